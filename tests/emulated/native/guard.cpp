// What c10 asks of a device: the current device and stream, events, synchronisation.
#include "emulated.h"
namespace emu {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmu; }
  static c10::Stream st(int d, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmu, d), id); }
  static int ix(c10::Device d) { return d.has_index() ? d.index() : cur_dev(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto o = getDevice();
    set_dev(ix(d));
    return o;
  }
  c10::Device getDevice() const override { return c10::Device(kEmu, cur_dev()); }
  void setDevice(c10::Device d) const override { set_dev(ix(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { tl_dev = ix(d); }
  c10::Stream getStream(c10::Device d) const override {
    touch();
    return st(ix(d), cur_stream(ix(d)));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return st(ix(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return st(ix(d), new_stream(ix(d))); }
  c10::Stream getNewStream(c10::Device d, int) const override { return st(ix(d), new_stream(ix(d))); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto o = getStream(s.device());
    set_stream(s.device_index(), s.id());
    return o;
  }
  static EventPtr& ev(void* e) { return *static_cast<EventPtr*>(e); }
  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(e); }
  void record(void** e, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new EventPtr(std::make_shared<Event>());
    record_event(ev(*e), s.device_index(), s.id());
  }
  void block(void* e, const c10::Stream& s) const override {
    if (!e) return;
    uint64_t v;
    {
      std::lock_guard<std::mutex> l(ev(e)->m);
      v = ev(e)->recorded;
    }
    stream_wait(ev(e), v, s.device_index(), s.id());
  }
  bool queryEvent(void* e) const override { return !e || ev(e)->query(); }
  c10::DeviceIndex deviceCount() const noexcept override {
    touch();
    return cfg().ndev;
  }
  bool queryStream(const c10::Stream& s) const override { return stream(s.device_index(), s.id()).empty(); }
  void synchronizeStream(const c10::Stream& s) const override {
    host_sync("stream.synchronize");
    stream(s.device_index(), s.id()).drain();
    raise_error(s.device_index());
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    host_sync("event.synchronize");
    NoGil g;
    uint64_t v;
    {
      std::lock_guard<std::mutex> l(ev(e)->m);
      v = ev(e)->recorded;
    }
    ev(e)->wait(v);
  }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    if (d < 0) d = cur_dev();
    host_sync("device.synchronize");
    for (auto& s : dev(d).s) s.drain();
    raise_error(d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    Alloc::get()->recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(ev(b)->at - ev(a)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace emu
