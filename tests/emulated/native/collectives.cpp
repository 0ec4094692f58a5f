// The collectives that pipelines use. Every rank sends its block to every other and adds them in the order of ranks.
#include "emulated.h"
namespace emu {
void FakeNccl::reduce_into(at::Tensor out, const Tensors& in, const c10d::ReduceOp& op) {
  auto acc = in[0].clone();
  for (size_t i = 1; i < in.size(); i++) switch (op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        acc.add_(in[i]);
        break;
      case c10d::ReduceOp::PRODUCT:
        acc.mul_(in[i]);
        break;
      case c10d::ReduceOp::MAX:
        acc.copy_(at::maximum(acc, in[i]));
        break;
      case c10d::ReduceOp::MIN:
        acc.copy_(at::minimum(acc, in[i]));
        break;
      default:
        TORCH_CHECK(false, "fakenccl: reduce op");
    }
  if (op == c10d::ReduceOp::AVG) acc.div_((int64_t)in.size());
  out.copy_(acc);
}
// Every rank gets every rank's block (blocks[r] for rank r), sends its own `mine(r)` to rank r.
void FakeNccl::all_blocks(Comm& c, const char* kind, const std::function<at::Tensor(int)>& mine, Tensors& blocks) {
  std::vector<Op> ops;
  for (int r = 0; r < getSize(); r++) {
    if (r == getRank()) {
      blocks[r].copy_(mine(r));
      continue;
    }
    auto s = mine(r);
    ops.push_back({true, r, (char*)s.data_ptr(), (size_t)s.nbytes()});
    ops.push_back({false, r, (char*)blocks[r].data_ptr(), (size_t)blocks[r].nbytes()});
  }
  exchange(c, kind, ops, ms());
}
Tensors FakeNccl::fresh(const at::Tensor& like) {
  Tensors v;
  for (int r = 0; r < getSize(); r++) v.push_back(at::empty(like.sizes(), like.options().device(at::kCPU)));
  return v;
}
WorkPtr FakeNccl::allreduce(Tensors& t, const c10d::AllreduceOptions& o) {
  auto x = t.at(0);
  int d = dv(x);
  auto c = comm("world", d, everyone());
  auto a = alias_cpu(x);
  auto op = o.reduceOp;
  return launch(
      c, d, c10d::OpType::ALLREDUCE, {x}, {x},
      [this, c, a, op] {
        auto b = fresh(a);
        all_blocks(*c, "allreduce", [&](int) { return a; }, b);
        reduce_into(a, b, op);
      },
      o.asyncOp);
}
WorkPtr FakeNccl::broadcast(Tensors& t, const c10d::BroadcastOptions& o) {
  auto x = t.at(0);
  int d = dv(x);
  auto c = comm("world", d, everyone());
  int root = o.rootRank;
  char* p = ptr(x);
  size_t n = x.nbytes();
  return launch(
      c, d, c10d::OpType::BROADCAST, {x}, {x},
      [this, c, root, p, n] {
        std::vector<Op> ops;
        if (getRank() == root) {
          for (int r = 0; r < getSize(); r++)
            if (r != root) ops.push_back({true, r, p, n});
        } else
          ops.push_back({false, root, p, n});
        exchange(*c, "broadcast", ops, ms());
      },
      o.asyncOp);
}
WorkPtr FakeNccl::allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) {
  auto x = in.at(0);
  int d = dv(x);
  auto c = comm("world", d, everyone());
  auto a = alias_cpu(x);
  Tensors b, keep{x};
  for (auto& t : out.at(0)) {
    dv(t);
    b.push_back(alias_cpu(t));
    keep.push_back(t);
  }
  return launch(
      c, d, c10d::OpType::ALLGATHER, keep, out.at(0),
      [this, c, a, b]() mutable { all_blocks(*c, "allgather", [&](int) { return a; }, b); }, o.asyncOp);
}
WorkPtr FakeNccl::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) {
  int d = dv(in);
  dv(out);
  auto c = comm("world", d, everyone());
  auto a = alias_cpu(in).view(-1), y = alias_cpu(out).view(-1);
  Tensors b;
  for (int r = 0; r < getSize(); r++) b.push_back(y.narrow(0, r * a.numel(), a.numel()));
  return launch(
      c, d, c10d::OpType::_ALLGATHER_BASE, {in, out}, {out},
      [this, c, a, b]() mutable { all_blocks(*c, "allgather", [&](int) { return a; }, b); }, o.asyncOp);
}
WorkPtr FakeNccl::_reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) {
  int d = dv(in);
  dv(out);
  auto c = comm("world", d, everyone());
  auto a = alias_cpu(in).view(-1), y = alias_cpu(out).view(-1);
  auto op = o.reduceOp;
  int64_t n = y.numel();
  return launch(
      c, d, c10d::OpType::_REDUCE_SCATTER_BASE, {in, out}, {out},
      [this, c, a, y, op, n] {
        auto b = fresh(y);
        all_blocks(*c, "reduce_scatter", [&](int r) { return a.narrow(0, r * n, n); }, b);
        reduce_into(y, b, op);
      },
      o.asyncOp);
}
WorkPtr FakeNccl::reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) {
  auto y0 = out.at(0);
  int d = dv(y0);
  auto c = comm("world", d, everyone());
  auto y = alias_cpu(y0);
  auto op = o.reduceOp;
  Tensors s, keep{y0};
  for (auto& t : in.at(0)) {
    dv(t);
    s.push_back(alias_cpu(t));
    keep.push_back(t);
  }
  return launch(
      c, d, c10d::OpType::REDUCE_SCATTER, keep, {y0},
      [this, c, s, y, op] {
        auto b = fresh(y);
        all_blocks(*c, "reduce_scatter", [&](int r) { return s[r]; }, b);
        reduce_into(y, b, op);
      },
      o.asyncOp);
}
WorkPtr FakeNccl::barrier(const c10d::BarrierOptions&) {  // NCCL's barrier blocks the host
  int d = cur_dev();
  auto c = comm("world", d, everyone());
  auto w = launch(c, d, c10d::OpType::BARRIER, {}, {}, [this, c] {
    auto one = at::zeros({1}, at::kByte);
    Tensors b = fresh(one);
    all_blocks(*c, "barrier", [&](int) { return one; }, b);
  });
  host_sync("barrier");
  stream(d, c->sid).drain();
  raise_error(d);
  return w;
}
void bind_nccl(py::module& m) {
  m.def("make_nccl",
        [](const c10::intrusive_ptr<c10d::Store>& s, int rank, int size,
           const std::chrono::duration<double>& t) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<FakeNccl>(s, rank, size, std::chrono::duration_cast<std::chrono::milliseconds>(t));
        });
}
}  // namespace emu
