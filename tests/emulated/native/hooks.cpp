// What at:: asks of an accelerator.
#include "emulated.h"
namespace emu {
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return cfg().ndev; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_dev(d); }
  c10::DeviceIndex getCurrentDevice() const override { return cur_dev(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto o = cur_dev();
    set_dev(d);
    return o;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return Pinned::get()->has(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return Pinned::get(); }
  at::Device getDeviceFromPtr(void* p) const override {
    auto* a = Alloc::get();
    std::lock_guard<std::mutex> l(a->m);
    auto i = a->live.find(p);
    TORCH_CHECK(i != a->live.end(), "not an emu pointer");
    return at::Device(kEmu, i->second->dev);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_gen(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Gen>(d < 0 ? cur_dev() : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override;
};
}  // namespace emu
