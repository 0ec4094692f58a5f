// Random numbers: each operator takes (seed, offset) when it is enqueued, as Philox does on CUDA, and draws from a CPU
// generator made of the two when it runs.
#include "emulated.h"
namespace emu {
struct Gen final : c10::GeneratorImpl {  // (seed, offset), taken at enqueue time as Philox is on CUDA
  uint64_t s = c10::default_rng_seed_val, off = 0;
  explicit Gen(int d) : GeneratorImpl(c10::Device(kEmu, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kEmu; }
  void set_current_seed(uint64_t x) override {
    s = x;
    off = 0;
  }
  void set_offset(uint64_t o) override { off = o; }
  uint64_t get_offset() const override { return off; }
  uint64_t current_seed() const override { return s; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return s;
  }
  void set_state(const c10::TensorImpl& t) override {
    auto* p = static_cast<const uint64_t*>(t.data());
    s = p[0];
    off = p[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte);
    auto* p = static_cast<uint64_t*>(t.mutable_data_ptr());
    p[0] = s;
    p[1] = off;
    return t.getIntrusivePtr();
  }
  Gen* clone_impl() const override {
    auto* g = new Gen(device().index());
    g->s = s;
    g->off = off;
    return g;
  }
  at::Generator next() {  // the CPU generator of one op
    std::lock_guard<std::mutex> l(mutex_);
    uint64_t x = s * 0x9e3779b97f4a7c15ull + ++off;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    return at::detail::createCPUGenerator(x);
  }
};
static const at::Generator& default_gen(int d) {
  static auto* v = [] {
    auto* v = new std::vector<at::Generator>;
    for (int i = 0; i < cfg().ndev; i++) v->push_back(at::make_generator<Gen>(i));
    return v;
  }();
  return v->at(d < 0 ? cur_dev() : d);
}
}  // namespace emu
