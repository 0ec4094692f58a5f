// The few kernels of its own: creation, copies, views of storage, dropout, attention.
#include "emulated.h"
namespace emu {
static at::Tensor empty_mf(c10::IntArrayRef size, std::optional<at::ScalarType> dt, std::optional<at::Layout>,
                           std::optional<at::Device> dv, std::optional<bool> pin, std::optional<at::MemoryFormat> mf) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(dv ? *dv : c10::Device(kEmu));
  return at::detail::empty_generic(size, Alloc::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dt), mf);
}
static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef str, std::optional<at::ScalarType> dt,
                                std::optional<at::Layout>, std::optional<at::Device> dv, std::optional<bool>) {
  c10::DeviceGuard g(dv ? *dv : c10::Device(kEmu));
  return at::detail::empty_strided_generic(size, str, Alloc::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dt));
}
static at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool nb) {
  if (!dst.numel()) return dst;
  auto bytes = (double)dst.nbytes();
  bool se = src.device().type() == kEmu, de = dst.device().type() == kEmu;
  bool link = se && de && src.device().index() != dst.device().index();
  double within = cfg().bytes_per_us > 0 ? cfg().bytes_per_us / 2 : cfg().copy_bytes_per_us;  // read and written
  double rate = link ? cfg().link_bytes_per_us : se && de ? within : cfg().copy_bytes_per_us;
  double us = (rate > 0 ? bytes / rate : 0) + (link ? cfg().link_latency_us : 0);
  if (se && de && !link) cfg().charged_ns += (int64_t)(us * 1e3);
  auto copy = [us](at::Tensor a, at::Tensor b) {
    auto t0 = Clock::now();
    a.copy_(b);
    if (us > 0) std::this_thread::sleep_until(t0 + std::chrono::nanoseconds((int64_t)(us * 1e3)));
  };
  at::AutoDispatchBelowADInplaceOrView g;
  if (se && de) {
    int a = src.device().index(), b = dst.device().index();
    auto x = alias_cpu(dst), y = src.sizes() == dst.sizes() ? alias_cpu(src) : alias_cpu(src.expand(dst.sizes()));
    if (a != b) {
      auto e = std::make_shared<Event>();
      stream_wait(e, record_event(e, b, cur_stream(b)), a, cur_stream(a));
    }
    stream(a, cur_stream(a)).push([=] { copy(x, y); });
    if (a != b) {
      auto e = std::make_shared<Event>();
      stream_wait(e, record_event(e, a, cur_stream(a)), b, cur_stream(b));
    }
  } else if (de) {  // host to device
    int d = dst.device().index();
    auto& st = stream(d, cur_stream(d));
    auto x = alias_cpu(dst);
    auto y = src.expand(dst.sizes());
    bool pinned = Pinned::get()->has(src.storage().data());
    if (nb && !pinned) y = y.clone();  // pageable: staged before the call returns
    st.push([=] { copy(x, y); });
    if (!nb) {
      host_sync("copy_ host to device, blocking");
      st.drain();
      raise_error(d);
    }
  } else {  // device to host
    int d = src.device().index();
    auto& st = stream(d, cur_stream(d));
    auto y = alias_cpu(src.expand(dst.sizes()));
    bool pinned = Pinned::get()->has(dst.storage().data());
    auto x = dst;
    st.push([=] { copy(x, y); });
    if (!nb || !pinned) {
      host_sync(nb ? "copy_ device to pageable host" : "copy_ device to host, blocking");
      st.drain();
      raise_error(d);
    }
  }
  return dst;
}
static at::Tensor as_strided(const at::Tensor& s, c10::IntArrayRef sz, c10::IntArrayRef st, std::optional<int64_t> o) {
  return at::native::as_strided_tensorimpl(s, sz, st, o);
}
static const at::Tensor& resize_(const at::Tensor& t, c10::IntArrayRef sz, std::optional<at::MemoryFormat> mf) {
  if (t.sizes() != sz) {
    auto m =
        at::empty(sz, at::TensorOptions().device(at::kMeta).memory_format(mf.value_or(at::MemoryFormat::Contiguous)));
    resize_to(t, sz, m.strides());
  }
  return t;
}
static at::Tensor& set_storage(at::Tensor& t, at::Storage s, int64_t o, c10::IntArrayRef sz, c10::IntArrayRef st) {
  return at::native::set_storage_cpu_(t, std::move(s), o, sz, st);
}
static at::Tensor& set_src(at::Tensor& t, at::Storage s) {
  int64_t n = s.nbytes() / t.itemsize();
  return at::native::set_storage_cpu_(t, std::move(s), 0, {n}, {});
}
static at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& s) {
  return at::native::set_storage_cpu_(t, s.storage(), s.storage_offset(), s.sizes(), s.strides());
}
static void record_stream(at::Tensor& t, c10::Stream s) { Alloc::get()->recordStream(t.storage().data_ptr(), s); }
static std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, at::kBool)};
  auto mask = at::empty_like(x, at::kBool);
  mask.bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(x) : x.mul(mask).mul(1.0 / (1 - p)), mask};
}
static at::Tensor native_dropout_backward(const at::Tensor& g, const at::Tensor& mask, double scale) {
  return g.mul(mask).mul(scale);
}
// the attention kernel that a CPU tensor would get, so that emu and CPU agree to the bit
static at::Tensor sdpa(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale,
                       bool gqa) {
  std::optional<at::Tensor> m = mask;
  if (m && m->defined() && m->scalar_type() == at::kBool)
    m = at::where(*m, at::zeros({}, q.options()), at::full({}, -std::numeric_limits<double>::infinity(), q.options()));
  bool grad_mask = m && m->defined() && m->requires_grad();
  if (q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && p == 0 && !gqa && !grad_mask && q.size(-1) == v.size(-1) &&
      q.size(2) && k.size(2) && !(causal && m && m->defined()))
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, m, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, p, causal, {}, scale, gqa));
}
// Module.to() keeps a Parameter's identity (tied weights!) only if this says yes, as it does for CUDA
static bool shallow_ok(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && b.layout() == at::kStrided;
}
}  // namespace emu
