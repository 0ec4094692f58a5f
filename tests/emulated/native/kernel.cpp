// The one kernel behind nearly every operator: shapes come from the meta device when the operator is called, values
// from the CPU's own kernel when the stream gets there. So a result is the CPU's to the bit, if everybody has waited.
#include "emulated.h"
namespace emu {
static bool writes(const c10::AliasInfo* alias) { return alias && alias->isWrite(); }

static bool is_tensors(const c10::TypePtr& type) {
  auto kind = type->kind();
  return kind == c10::TypeKind::TensorType ||
         (kind == c10::TypeKind::ListType && type->containedType(0)->kind() == c10::TypeKind::TensorType);
}

// Some CPU kernels leave outputs empty that nobody needs: batch_norm's saved statistics in evaluation.
static void copy_back(const c10::IValue& target, const c10::IValue& source) {
  if (source.isTensor()) {
    auto a = target.toTensor(), b = source.toTensor();
    if (a.defined() && b.defined() && (b.numel() || !a.numel())) a.copy_(b);
  } else if (source.isTensorList()) {
    auto a = target.toTensorVector(), b = source.toTensorVector();
    for (size_t k = 0; k < a.size(); k++) a[k].copy_(b[k]);
  }
}

struct Call {
  const c10::OperatorHandle& op;
  const std::vector<c10::Argument>& takes;
  const std::vector<c10::Argument>& gives;
  std::vector<c10::IValue> args;
  std::string name;
  int d = -1;
  torch::jit::Stack like;  // outputs on the meta device
  std::vector<c10::IValue> outs;
  std::shared_ptr<torch::jit::Stack> cpu_args = std::make_shared<torch::jit::Stack>();
  std::vector<std::pair<at::Tensor, at::Tensor>> scalars;  // (where it belongs, what the CPU kernel writes)

  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op(op),
        takes(op.schema().arguments()),
        gives(op.schema().returns()),
        args(stack.end() - takes.size(), stack.end()),
        name(op.schema().name()),
        outs(gives.size()) {}

  // One device; CPU tensors only as scalars or indices, as on CUDA.
  void find_device() {
    bool indexes =
        name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 || name == "aten::_unsafe_index";
    constexpr auto two = "Expected all tensors to be on the same device, but found at least two devices, emu";
    auto look = [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      if (t.device().type() == kEmu) {
        TORCH_CHECK(d < 0 || d == t.device().index(), two, ":", d, " and ", t.device(), "! (", name, ")");
        d = t.device().index();
      } else {
        TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || indexes), two, " and ", t.device(), "! (", name, ")");
      }
      return t;
    };
    for (auto& a : args) {
      map_iv(a, look);
      if (a.isDevice() && d < 0 && a.toDevice().type() == kEmu) d = Guard::ix(a.toDevice());
    }
    if (d < 0) d = cur_dev();
  }

  bool is_written(size_t i) const {
    return writes(takes[i].alias_info()) && args[i].isTensor() && args[i].toTensor().defined();
  }

  // Whether the result's size depends on values: the host must wait for them.
  bool depends_on_values() const {
    if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
    for (auto& r : gives)
      if (!is_tensors(r.type())) return true;
    return false;
  }

  // In place, or out= of the right size: nothing to infer.
  bool sizes_are_known() const {
    bool known = !gives.empty();
    for (auto& r : gives) known = known && writes(r.alias_info());
    for (size_t i = 0; i < args.size(); i++)
      if (writes(takes[i].alias_info()) && args[i].isTensor()) {
        auto t = args[i].toTensor();
        known = known && t.defined() && t.numel() > 0;
      }
    return known;
  }

  // Fills `like` and gives out= tensors their size; false where there is no meta kernel.
  bool infer() {
    if (sizes_are_known()) {
      like.resize(gives.size());
      return true;
    }
    std::vector<c10::IValue> meta;
    for (auto& a : args) {
      if (a.isGenerator())
        meta.emplace_back();
      else if (a.isDevice())
        meta.emplace_back(c10::Device(c10::kMeta));
      else
        meta.push_back(map_iv(a, alias_meta));
    }
    try {
      at::AutoDispatchBelowADInplaceOrView g;
      like = meta;
      op.callBoxed(&like);
    } catch (py::error_already_set& e) {
      // Some meta kernels are Python: what is raised there to end the caller (a signal's exception) is none of theirs.
      py::gil_scoped_acquire gil;
      if (!e.matches(PyExc_Exception)) throw;
      like.clear();
      return false;
    } catch (const std::exception& e) {
      like.clear();
      if (getenv("EMU_DEBUG")) fprintf(stderr, "emu: no meta for %s: %.300s\n", name.c_str(), e.what());
      return false;
    }
    for (size_t i = 0; i < args.size(); i++)
      if (is_written(i)) {
        const auto& m = meta[i].toTensor();
        if (args[i].toTensor().sizes() != m.sizes()) resize_to(args[i].toTensor(), m.sizes(), m.strides());
      }
    return true;
  }

  // Random operators take (seed, offset) now. A loss that is reduced uses its scalar out= as scratch of another size:
  // it gets an empty tensor, which may be resized without a warning.
  void alias_arguments() {
    for (size_t i = 0; i < args.size(); i++) {
      auto type = takes[i].type()->str();
      if (type == "Generator" || type == "Generator?") {
        auto g = args[i].isGenerator() ? args[i].toGenerator() : default_gen(d);
        TORCH_CHECK(g.device().type() == kEmu, "Expected a 'emu' device type for generator but found '",
                    g.device().type(), "'");
        cpu_args->emplace_back(g.get<Gen>()->next());
      } else if (args[i].isDevice()) {
        cpu_args->emplace_back(c10::Device(c10::kCPU));
      } else if (takes[i].is_out() && is_written(i) && args[i].toTensor().dim() == 0) {
        auto scratch = at::empty({0}, args[i].toTensor().options().device(c10::kCPU));
        scalars.emplace_back(alias_cpu(args[i].toTensor()), scratch);
        cpu_args->emplace_back(scratch);
      } else {
        cpu_args->push_back(map_iv(args[i], alias_cpu));
      }
    }
  }
  int base_of(const c10::AliasInfo* alias) const {
    for (size_t j = 0; alias && j < takes.size(); j++)
      if (auto* other = takes[j].alias_info())
        for (auto& s : alias->beforeSets())
          if (other->beforeSets().count(s)) return j;
    return -1;
  }

  // Device tensors for the results: what was given, a view of it, or new.
  void make_outputs(const torch::jit::Stack& shapes) {
    for (size_t i = 0; i < gives.size(); i++) {
      auto* alias = gives[i].alias_info();
      int j = base_of(alias);
      if (j >= 0 && alias->isWrite()) {
        outs[i] = args[j];
      } else if (j >= 0 && args[j].isTensor()) {
        auto b = args[j].toTensor();
        outs[i] = map_iv(shapes[i], [&](const at::Tensor& m) -> at::Tensor {
          auto r = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(b.storage()),
                                                            b.key_set(), m.dtype());
          r.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes(), m.strides(), m.storage_offset());
          return r;
        });
      } else {
        outs[i] = map_iv(shapes[i], [&](const at::Tensor& m) { return m.defined() ? new_like(m, d) : m; });
      }
    }
  }

  bool gives_views_only() const {
    for (auto& r : gives)
      if (!r.alias_info() || r.alias_info()->isWrite() || base_of(r.alias_info()) < 0) return false;
    return !gives.empty();
  }

  void enqueue(StreamImpl& st) {
    make_outputs(like);
    if (gives_views_only()) return;
    auto targets = std::make_shared<std::vector<c10::IValue>>();
    for (size_t i = 0; i < gives.size(); i++)
      targets->push_back(gives[i].alias_info() ? c10::IValue() : map_iv(outs[i], alias_cpu));
    st.push([op = op, cpu_args = cpu_args, targets, scalars = scalars, d = d, us = cost_us(name, *cpu_args, *targets)] {
      run_on(d, us, [&] {
        op.callBoxed(cpu_args.get());
        for (size_t i = 0; i < targets->size(); i++)
          if (!(*targets)[i].isNone()) copy_back((*targets)[i], (*cpu_args)[i]);
        for (auto& [target, scratch] : scalars) target.copy_(scratch);
      });
    });
  }

  // The host waits: the operator depends on values, or has no meta kernel.
  void run_now(StreamImpl& st) {
    st.drain();
    raise_error(d);
    at::AutoDispatchBelowADInplaceOrView g;
    std::vector<std::pair<at::Tensor, at::Tensor>> late;  // an empty out= tensor gets its size from the CPU kernel
    for (size_t i = 0; i < args.size(); i++)
      if (is_written(i) && !args[i].toTensor().numel()) {
        auto t = at::empty({0}, args[i].toTensor().options().device(c10::kCPU));
        (*cpu_args)[i] = t;
        late.emplace_back(args[i].toTensor(), t);
      }
    op.callBoxed(cpu_args.get());
    for (auto& [target, scratch] : scalars) target.copy_(scratch);
    for (auto& [t, c] : late) resize_to(t, c.sizes(), c.strides());
    make_outputs(*cpu_args);
    st.drain();  // memory that was handed out again is overwritten by the stream: before the host writes it
    for (auto& [t, c] : late) alias_cpu(t).copy_(c);
    for (size_t i = 0; i < gives.size(); i++) {
      if (gives[i].alias_info()) continue;
      if (outs[i].isTensor() || outs[i].isTensorList())
        copy_back(map_iv(outs[i], alias_cpu), (*cpu_args)[i]);
      else
        outs[i] = (*cpu_args)[i];
    }
  }
};

static void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack);
  call.find_device();
  auto& st = stream(call.d, cur_stream(call.d));
  if (cfg().first_use) {  // its module is loaded: the device is waited for
    static std::set<std::pair<int, std::string>> loaded;
    static std::mutex m;
    bool first;
    {
      std::lock_guard<std::mutex> l(m);
      first = loaded.insert({call.d, call.name + "." + op.schema().overload_name()}).second;
    }
    if (first) drain_device(call.d);
  }
  bool waits = call.depends_on_values();
  bool inferred = !waits && call.infer();
  call.alias_arguments();
  torch::jit::drop(*stack, call.takes.size());
  if (inferred) {
    call.enqueue(st);
  } else {
    if (waits)
      host_sync(call.name.c_str());
    else
      count(cfg().sync_fallbacks, call.name + "." + op.schema().overload_name());
    call.run_now(st);
  }
  if (!cfg().async) {  // as CUDA_LAUNCH_BLOCKING=1
    st.drain();
    raise_error(call.d);
  }
  for (auto& o : call.outs) stack->push_back(std::move(o));
}
}  // namespace emu
