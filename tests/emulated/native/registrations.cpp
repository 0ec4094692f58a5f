// Which kernel serves which operator. Operators with a CPU kernel and a composite one take the CPU's, or bits differ.
#include "emulated.h"
namespace emu {
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_mf);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_src);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  // ops with a composite kernel besides their CPU kernel: take the CPU's
  m.impl("_has_compatible_shallow_copy_type", shallow_ok);
  auto& D = c10::Dispatcher::singleton();
  std::set<std::string> own{"aten::empty.memory_format", "aten::empty_strided",
                            "aten::as_strided",          "aten::resize_",
                            "aten::native_dropout",      "aten::native_dropout_backward"};
  auto cpu = D.getRegistrationsForDispatchKey(c10::DispatchKey::CPU);
  std::set<std::string> todo{"aten::convolution", "aten::convolution_backward"};
  for (auto& o : cpu) {
    auto h = D.findOp(o);
    if (h && (h->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
              h->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)))
      todo.insert(c10::toString(o));
  }
  for (auto& n : todo)
    if (n.rfind("aten::", 0) == 0 && !own.count(n))
      m.impl(n.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", sdpa);
  m.impl("_has_compatible_shallow_copy_type", shallow_ok);
}
}  // namespace emu
