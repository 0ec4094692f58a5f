// A torch.distributed backend with NCCL's order: a communicator has a stream of its own, transfers wait for what the
// current stream has been given, and a batch joins the communicator of all ranks. A pair of ranks shares one
// communicator, as in ProcessGroupNCCL: two directions in one group block each other, so a pipeline needs groups.
#include "emulated.h"
namespace emu {
struct FakeNccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout;
  int lfd;
  std::string path;
  std::thread acc;
  std::atomic<bool> dead{false}, stopped{false};
  std::mutex m;
  std::condition_variable cv;
  std::map<std::string, int> inbound;
  std::map<std::string, std::shared_ptr<Comm>> comms;
  int grouping = 0;
  std::vector<Op> pend;
  Tensors pend_t;
  int pend_dev = 0;
  uint64_t seqno = 0;
  c10::intrusive_ptr<Options> opts;

  FakeNccl(c10::intrusive_ptr<c10d::Store> s, int rank, int size, std::chrono::milliseconds t)
      : Backend(rank, size), store(s), timeout(t) {
    opts = c10::make_intrusive<Options>("fakenccl", t);
    path = "emu-" + std::to_string(getpid()) + "-" + std::to_string((uintptr_t)this) + "-" + std::to_string(now_ns());
    lfd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    auto a = addr(path);
    TORCH_CHECK(!bind(lfd, (sockaddr*)&a.first, a.second) && !listen(lfd, 256), "fakenccl: bind");
    acc = std::thread([this] { welcome(); });
    store->set("addr/" + std::to_string(rank), path);
  }
  // Who connects says first which communicator it means.
  void welcome() {
    while (!dead) {
      pollfd p{lfd, POLLIN, 0};
      if (poll(&p, 1, 100) <= 0) continue;
      int fd = accept4(lfd, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      uint32_t n = 0;
      std::string k;
      if (::recv(fd, &n, 4, MSG_WAITALL) != 4) {
        close(fd);
        continue;
      }
      k.resize(n);
      if (::recv(fd, k.data(), n, MSG_WAITALL) != (ssize_t)n) {
        close(fd);
        continue;
      }
      fcntl(fd, F_SETFL, O_NONBLOCK);
      {
        std::lock_guard<std::mutex> l(m);
        inbound[k] = fd;
      }
      cv.notify_all();
    }
  }
  ~FakeNccl() override { stop(); }
  void stop() {
    abort();
    if (stopped.exchange(true)) return;
    NoGil g;
    if (acc.joinable()) acc.join();
    close(lfd);
  }
  void abort() override {  // as ncclCommAbort: transfers under way end, and so do those that wait for members
    std::lock_guard<std::mutex> l(m);
    dead = true;
    cv.notify_all();
  }
  void shutdown() override { stop(); }
  const std::string getBackendName() const override { return "fakenccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return opts; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(at::Device device) override { comm("world", device.index(), everyone()); }
  void setTimeout(std::chrono::milliseconds t) override { timeout = t; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return seqno; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  static std::pair<sockaddr_un, socklen_t> addr(const std::string& p) {
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    memcpy(a.sun_path + 1, p.data(), p.size());
    return {a, (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + p.size())};
  }

  // Makes a communicator. As ncclCommInitRank: the host blocks until every member is here.
  std::shared_ptr<Comm> comm(const std::string& key, int d, const std::vector<int>& members) {
    auto i = comms.find(key);
    if (i != comms.end()) return i->second;
    NoGil g;
    auto c = std::make_shared<Comm>();
    c->key = key;
    c->dev = d;
    c->sid = new_comm_stream(d);
    stream(d, c->sid).eager = true;
    for (int r : members)
      if (r != getRank()) {
        auto a0 = store->get("addr/" + std::to_string(r));
        auto a = addr(std::string(a0.begin(), a0.end()));
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        TORCH_CHECK(!connect(fd, (sockaddr*)&a.first, a.second), "fakenccl: connect to rank ", r);
        auto k = key + "/" + std::to_string(getRank());
        uint32_t n = k.size();
        TORCH_CHECK(::send(fd, &n, 4, 0) == 4 && ::send(fd, k.data(), n, 0) == (ssize_t)n, "fakenccl: hello");
        fcntl(fd, F_SETFL, O_NONBLOCK);
        c->tx[r].fd = fd;
      }
    for (int r : members)
      if (r != getRank()) {
        std::unique_lock<std::mutex> l(m);
        auto k = key + "/" + std::to_string(r);
        TORCH_CHECK(cv.wait_for(l, timeout, [&] { return dead || inbound.count(k); }), "fakenccl: rank ", getRank(),
                    " waited ", timeout.count(), " ms for rank ", r, " to join communicator ", key);
        TORCH_CHECK(!dead, "fakenccl: communicator ", key, " aborted");
        c->rx[r].fd = inbound[k];
      }
    comms[key] = c;
    return c;
  }
  void exchange(Comm& c, const char* kind, const std::vector<Op>& ops, int64_t limit_ms) {
    Exchange(c, kind, getRank(), ops).run(dead, limit_ms);
  }
  std::vector<int> everyone() {
    std::vector<int> v;
    for (int i = 0; i < getSize(); i++) v.push_back(i);
    return v;
  }

  // The communicator's stream waits for the current stream; the work's event is recorded at its end.
  WorkPtr launch(const std::shared_ptr<Comm>& c, int d, c10d::OpType t, Tensors keep, Tensors outs, Task f,
                 bool async = true) {
    seqno++;
    int64_t sid = async ? c->sid : cur_stream(d);
    if (async) {
      auto e = std::make_shared<Event>();
      stream_wait(e, record_event(e, d, cur_stream(d)), d, sid);
    }
    stream(d, sid).push([keep, f, self = c10::intrusive_ptr<FakeNccl>::reclaim_copy(this)] { f(); });
    auto e = std::make_shared<Event>();
    auto v = record_event(e, d, sid);
    if (!cfg().async) stream(d, sid).drain();  // as CUDA_LAUNCH_BLOCKING=1
    auto w = c10::make_intrusive<EWork>(getRank(), t, e, v, d, outs);
    w->fut = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                      std::vector<c10::Device>{c10::Device(kEmu, d)});
    {
      c10::StreamGuard g(c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmu, d), sid));
      w->fut->markCompleted(at::IValue(outs));
    }
    return w;
  }
  static int dv(const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == kEmu, "fakenccl: No backend type associated with device type ", t.device());
    TORCH_CHECK(t.is_contiguous(), "fakenccl: Tensors must be contiguous");
    return t.device().index();
  }
  static char* ptr(const at::Tensor& t) { return (char*)t.mutable_data_ptr(); }
  int64_t ms() { return timeout.count(); }

  WorkPtr p2p(const at::Tensor& t, int peer, bool snd) {
    int d = dv(t);
    Op o{snd, peer, ptr(t), (size_t)t.nbytes()};
    if (grouping) {
      pend.push_back(o);
      pend_t.push_back(t);
      pend_dev = d;
      return nullptr;
    }
    bool pair = cfg().p2p_pair_comm && !getBoundDeviceId();
    int a = std::min(getRank(), peer),
        b = std::max(getRank(), peer);  // as ProcessGroupNCCL: own 2-rank communicator unless eagerly initialised
    auto c = pair ? comm("p2p" + std::to_string(a) + ":" + std::to_string(b), d, {a, b}) : comm("world", d, everyone());
    // As NCCL itself: whoever sends holds the tensor (or its work, which does) until it has left.
    return launch(c, d, snd ? c10d::OpType::SEND : c10d::OpType::RECV, {}, {t},
                  [this, c, o] { exchange(*c, "p2p", {o}, ms()); });
  }
  WorkPtr send(Tensors& t, int peer, int) override { return p2p(t.at(0), peer, true); }
  WorkPtr recv(Tensors& t, int peer, int) override { return p2p(t.at(0), peer, false); }
  void startCoalescing() override { grouping++; }
  WorkPtr endCoalescing() override {
    grouping--;
    if (pend.empty()) return nullptr;
    auto ops = std::move(pend);
    auto ts = std::move(pend_t);
    pend.clear();
    pend_t.clear();
    int d = pend_dev;
    auto c = comm("world", d, everyone());
    return launch(c, d, c10d::OpType::COALESCED, {}, ts, [this, c, ops] { exchange(*c, "p2p", ops, ms()); });
  }
  static void reduce_into(at::Tensor out, const Tensors& in, const c10d::ReduceOp& op);
  void all_blocks(Comm& c, const char* kind, const std::function<at::Tensor(int)>& mine, Tensors& blocks);
  Tensors fresh(const at::Tensor& like);
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override;
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override;
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override;
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override;
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override;
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
};
}  // namespace emu
