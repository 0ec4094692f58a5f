// CPU and meta tensors over the memory of device tensors. They do not own it: a use after free must show.
#include "emulated.h"
namespace emu {
static at::Tensor shell(const at::Tensor& t, c10::DispatchKey key, void* p, c10::Device d) {
  auto st = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(p, d),
                         c10::GetAllocator(d.type()), key == c10::DispatchKey::Meta);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(st), c10::DispatchKeySet(key), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  return r;
}
at::Tensor alias_cpu(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (t.is_cpu()) {
    auto r = t.clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
    return r;
  }
  return shell(t, c10::DispatchKey::CPU, t.storage().mutable_data(), c10::Device(c10::kCPU));
}
static at::Tensor alias_meta(const at::Tensor& t) {
  return t.defined() && !(t.is_cpu() && t.dim() == 0)
             ? shell(t, c10::DispatchKey::Meta, nullptr, c10::Device(c10::kMeta))
             : t;
}
template <class F>
static c10::IValue map_iv(const c10::IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> r;
    for (const auto& t : v.toTensorVector()) r.push_back(f(t));
    return r;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> r;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      r.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return r;
  }
  return v;
}
static void grow(c10::StorageImpl* s, size_t n) {  // stream-ordered, as on CUDA
  if (n == 0) s->set_data_ptr(c10::DataPtr(nullptr, s->device()));
  if (n <= s->nbytes()) {
    s->set_nbytes(n);
    return;
  }
  c10::DeviceGuard g(s->device());
  int d = s->device().index();
  auto p = Alloc::get()->allocate(n);
  void* a = p.get();
  void* b = s->mutable_data();
  auto k = s->nbytes();
  if (k) stream(d, cur_stream(d)).push([a, b, k] { memcpy(a, b, k); });
  s->set_data_ptr(std::move(p));
  s->set_nbytes(n);
}
void Hooks::resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const { grow(s.unsafeGetStorageImpl(), n); }
static void resize_to(const at::Tensor& t, c10::IntArrayRef sz, c10::IntArrayRef st) {
  auto need = at::detail::computeStorageNbytes(sz, st, t.itemsize(), t.storage_offset());
  if (need > t.storage().nbytes()) grow(t.storage().unsafeGetStorageImpl(), need);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sz, st);
}
static at::Tensor new_like(const at::Tensor& meta, int d) {
  c10::DeviceGuard g(c10::Device(kEmu, d));
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), Alloc::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.scalar_type());
}
}  // namespace emu
