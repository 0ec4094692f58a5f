// An emulated accelerator for tests: a torch device whose streams are real threads, so that code which forgets to wait
// computes wrong numbers, as it would on CUDA. Operators run by the CPU's own kernels on the same memory.
#pragma once
#include <Python.h>
#include <pybind11/pybind11.h>
#include <ATen/core/Tensor.h>
namespace py = pybind11;
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace emu {
using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;
constexpr int kPool = 32, kComms = 96, kStreams = 1 + kPool + kComms;
constexpr auto kEmu = c10::DeviceType::PrivateUse1;

// Lets the GIL go while the host blocks, whoever the caller is.
struct NoGil {
  PyThreadState* s = nullptr;
  NoGil() {
    if (Py_IsInitialized() && PyGILState_Check()) s = PyEval_SaveThread();
  }
  ~NoGil() {
    if (s) PyEval_RestoreThread(s);
  }
};

struct StreamImpl;
struct Event {  // one cudaEvent_t
  std::mutex m;
  std::condition_variable cv;
  uint64_t recorded = 0, done = 0;  // versions
  Clock::time_point at;
  StreamImpl* src = nullptr;
  uint64_t idx = 0;  // where it was recorded last
  void wait(uint64_t v);
  bool query();
};
using EventPtr = std::shared_ptr<Event>;

struct HardwareQueue {  // streams share a few: a task leaves when it starts, a wait when it ends, and others stand behind
  std::mutex m;
  std::condition_variable cv;
  uint64_t next = 0, left = 0;
  void until(uint64_t ticket);
  void leave();
};
struct Queued {
  Task run;
  bool waits;
  HardwareQueue* hardware;
  uint64_t ticket;
};

struct StreamImpl {
  int dev = 0;
  int64_t id = 0;
  std::mutex m;
  std::condition_variable cv, idle;
  std::deque<Queued> q;
  bool started = false;
  uint64_t enq = 0, fin = 0;
  std::atomic<int64_t> delay_us{0};  // deliberate delay before each task
  uint64_t want = 0;
  bool eager = false;  // lazy mode: run only what somebody waits for
  void demand(uint64_t i);
  void nudge();  // look again whether there is something to run
  uint64_t push(Task t, bool waits = false);
  void drain();  // host waits for the stream
  bool empty() {
    std::lock_guard<std::mutex> l(m);
    want = enq;
    cv.notify_one();
    return enq == fin;
  }
  void loop();
};

struct Config {
  int ndev = 2;
  bool async = true;
  int poison = 1;  // 0 never (as CUDA), 1 when a block is handed out again, 2 when it is freed
  bool skip_compute = false;
  bool serial = false;
  std::atomic<bool> lazy{false};
  std::atomic<int64_t> jitter_us{0};
  uint64_t seed = 1;
  int queue_limit = 1024;
  int sync_mode = 0;                         // 0 count, 1 warn, 2 raise
  std::atomic<int64_t> capacity{1ll << 34};  // bytes per device
  double op_us = 0, flops_per_us = 0, bytes_per_us = 0;  // a kernel: its launch, its products, what it reads and writes
  double copy_bytes_per_us = 0, link_bytes_per_us = 0, link_latency_us = 0;
  std::atomic<int64_t> charged_ns{0};  // what kernels were told to take, by the cost model alone
  bool p2p_pair_comm = true;
  bool lost_hangs = false;  // a peer that is gone is waited for, as NCCL may, until somebody aborts
  int64_t eager_bytes = 0;
  // Harsh: what makes a whole device wait, and what streams share
  bool first_use = false;     // a kernel that is loaded when it is first called
  bool memory_waits = false;  // memory that the allocator gets or gives back, of the device and of the host
  bool one_pool = false;      // communicators take streams of the users' pool
  bool touches = false;       // a process that has counted devices, or asked for a stream, must not fork
  int queues = 0;             // hardware queues of a device; 0: one for each stream
  std::mutex m;
  std::map<std::string, double> cost;  // op name -> us
  std::map<std::string, int64_t> syncs, sync_fallbacks;
};
Config& cfg();
StreamImpl& stream(int dev, int64_t id);
int cur_dev();
void set_dev(int d);
int64_t cur_stream(int dev);
void set_stream(int dev, int64_t id);
int64_t new_stream(int dev);       // for users: a pool of 32, handed out in turn, as torch.cuda
int64_t new_comm_stream(int dev);  // for communicators: never shared
void free_comm_stream(int dev, int64_t id);
void count(std::map<std::string, int64_t>& table, const std::string& what);
void host_sync(const char* why);  // count / warn / raise
void set_error(int dev, std::exception_ptr e);
void raise_error(int dev);  // async errors come up at the next host sync
void drain_device(int dev);  // as an implicit wait: whatever runs there must end
void touch();
uint64_t record_event(const EventPtr& e, int dev, int64_t sid);
void stream_wait(const EventPtr& e, uint64_t version, int dev, int64_t sid);
at::Tensor alias_cpu(const at::Tensor& t);  // CPU view of device memory, does not own it
void bind_nccl(py::module& m);
}  // namespace emu
