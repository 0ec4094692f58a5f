// Host memory that copies may use without staging; what was freed is overwritten.
#include "emulated.h"
namespace emu {
struct Pinned final : c10::Allocator {
  std::mutex m;
  std::map<const char*, size_t> live;
  static Pinned* get() {
    static auto* a = new Pinned;
    return a;
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (cfg().memory_waits) drain_device(cur_dev());
    TORCH_CHECK(!posix_memalign(&p, 64, n + 64), "pinned alloc");
    memset(p, 0xff, n);
    std::lock_guard<std::mutex> l(m);
    live[(char*)p] = n;
    return {p, p, &del, c10::Device(c10::kCPU)};
  }
  static void del(void* p) {
    auto* a = get();
    {
      std::lock_guard<std::mutex> l(a->m);
      auto it = a->live.find((char*)p);
      if (it == a->live.end()) return;
      if (cfg().poison) memset(p, 0xff, it->second);
      a->live.erase(it);
    }
    ::free(p);
  }
  bool has(const void* p) {
    std::lock_guard<std::mutex> l(m);
    auto i = live.upper_bound((const char*)p);
    if (i == live.begin()) return false;
    --i;
    return (const char*)p < i->first + std::max<size_t>(i->second, 1);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &del; }
  void copy_data(void* a, const void* b, size_t n) const override { default_copy_data(a, b, n); }
};
}  // namespace emu
