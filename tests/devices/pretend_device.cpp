// The pretend device: torch's device "cuda:0" without a GPU.
//
// Its memory is the CPU's. One boxed function replaces every kernel of the dispatch key CUDA. It
//   1. refuses tensors of several devices where CUDA's own kernels do,
//   2. counts itself as one launch, and as a synchronisation where CUDA waits for the device,
//   3. runs the CPU's kernel on aliases: tensors on the CPU with the same memory.
// Asynchrony, streams, CUDA's own numbers, cuDNN and a lack of memory are not simulated.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace {

using Names = std::unordered_set<std::string>;
const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

// ---- What torch asks a device for: a guard, hooks, an allocator -----------------------------------

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream other) const override { return other; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

// Releases of torch differ in their virtual functions, so these are not marked `override`.
struct Hooks final : public at::CUDAHooksInterface {
  void init() const {}
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const { return true; }
  bool hasCUDA() const { return true; }
  bool hasCUDART() const { return true; }
  bool isPinnedPtr(const void*) const { return false; }
  c10::DeviceIndex deviceCount() const { return 1; }
  c10::DeviceIndex current_device() const { return 0; }
  c10::DeviceIndex getCurrentDevice() const { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const {}
  int getNumGPUs() const { return 1; }
  c10::Device getDeviceFromPtr(void*) const { return DEVICE; }
  void deviceSynchronize(c10::DeviceIndex) const {}
};

void delete_memory(void* memory) { delete static_cast<c10::DataPtr*>(memory); }

struct Memory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    return {memory->get(), memory, &delete_memory, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

Guard guard;
Hooks hooks;
Memory memory;
at::Generator generator = at::detail::createCPUGenerator(67280421310721);

// ---- Counters -------------------------------------------------------------------------------------

bool counts = false;
bool refuses_to_wait = false;             // torch.cuda.set_sync_debug_mode("error")
std::map<std::string, int64_t> launches;  // by operator
py::object* on_wait = nullptr;            // called with the reason of each synchronisation

void launch(const std::string& name) {
  if (counts) launches[name]++;
}

void wait(const std::string& reason) {
  if (counts && on_wait) {
    py::gil_scoped_acquire locked;
    (*on_wait)(reason);
  }
  TORCH_CHECK(!refuses_to_wait, "called a synchronizing CUDA operation: ", reason);
}

// ---- Aliases: the same memory under another device ------------------------------------------------

void delete_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

c10::DataPtr share_memory(const c10::Storage& storage, c10::Device device) {
  auto* owner = new c10::Storage(storage);
  return {const_cast<void*>(storage.data()), owner, &delete_storage, device};
}

c10::Storage move_storage(const c10::Storage& storage, c10::Device device) {
  c10::Allocator* allocator = device.is_cuda() ? &memory : c10::GetCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      share_memory(storage, device), allocator, /*resizable=*/true);
}

at::Tensor make_tensor(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

at::Tensor to_device(const at::Tensor& tensor) {
  return make_tensor(move_storage(tensor.storage(), DEVICE), tensor, c10::DispatchKey::CUDA);
}

// The aliases of one call: tensors that share memory on the device share it on the CPU.
class Aliases {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto known = aliases_.find(tensor.unsafeGetTensorImpl());
    if (known != aliases_.end()) return known->second;
    auto* original = tensor.storage().unsafeGetStorageImpl();
    auto storage = storages_.find(original);
    if (storage == storages_.end()) {
      auto moved = move_storage(tensor.storage(), c10::Device(c10::DeviceType::CPU));
      original_storages_.emplace(moved.unsafeGetStorageImpl(), tensor.storage());
      storage = storages_.emplace(original, moved).first;
    }
    auto alias = make_tensor(storage->second, tensor, c10::DispatchKey::CPU);
    aliases_.emplace(tensor.unsafeGetTensorImpl(), alias);
    originals_.emplace(alias.unsafeGetTensorImpl(), std::make_pair(alias, tensor));
    return alias;
  }

  // A result: an original tensor, a view of an original's memory, or a new tensor.
  at::Tensor from_cpu(const at::Tensor& tensor) const {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    auto original = originals_.find(tensor.unsafeGetTensorImpl());
    if (original != originals_.end()) return original->second.second;
    auto storage = original_storages_.find(tensor.storage().unsafeGetStorageImpl());
    if (storage == original_storages_.end()) return to_device(tensor);
    return make_tensor(storage->second, tensor, c10::DispatchKey::CUDA);
  }

  bool is_original(const at::Tensor& tensor) const {
    return tensor.defined() && originals_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

  // Give originals the sizes and the memory of aliases that the kernel resized (`out=`).
  void resize_originals() const {
    for (const auto& entry : originals_) {
      const auto& [alias, original] = entry.second;
      const auto& resized = alias.storage();
      const auto& storage = original.storage();
      if (resized.data() != storage.data() || resized.nbytes() != storage.nbytes()) {
        auto* impl = storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(share_memory(resized, DEVICE));
        impl->set_nbytes(resized.nbytes());
      }
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
          alias.storage_offset() != original.storage_offset()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                              alias.storage_offset());
      }
    }
  }

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> aliases_;
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> original_storages_;
};

// ---- The kernel of every operator -----------------------------------------------------------------

Names takes_scalars;  // operators that take 0-d CPU tensors beside tensors on the device
const Names WAITS = {"aten::nonzero", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::masked_select",
    "aten::equal", "aten::is_nonzero", "aten::bincount", "aten::repeat_interleave",
    "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_qr"};
const Names INDEXES = {"aten::index", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) function(*tensor);
  }
}

template <typename Function>
void replace_tensors(c10::IValue& value, Function function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    value = c10::IValue(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional<at::Tensor>(function(*tensor)) : std::nullopt);
    value = c10::IValue(tensors);
  }
}

// Refuse what CUDA refuses, and count where it waits; return whether a result lies on the device.
bool check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t begin) {
  const auto& arguments = op.schema().arguments();
  const auto name = full_name(op.operator_name());
  const bool indexes = INDEXES.count(op.schema().name()) > 0;
  const bool indexes_device = indexes && stack[begin].toTensor().is_cuda();
  const bool takes_scalar = takes_scalars.count(name) > 0;
  bool has_device_tensor = false, makes_tensor = false;
  std::string on_cpu;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& value = stack[begin + i];
    const bool is_index = indexes && arguments[i].name() == "indices";
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const auto type = tensor.scalar_type();
      if (tensor.is_cuda()) {
        has_device_tensor = true;
        if (is_index && (type == at::kBool || type == at::kByte)) wait("boolean mask: " + name);
      } else if (is_index && indexes_device) {
        wait("index by a CPU tensor: " + name);
      } else if (tensor.is_cpu() && !(tensor.dim() == 0 && takes_scalar)) {
        on_cpu = arguments[i].name();
      }
    });
    makes_tensor |= value.isDevice() && value.toDevice().is_cuda();
    TORCH_CHECK(arguments[i].name() != "generator" || value.isNone() ||
                    value.toGenerator().device().is_cuda(),
                "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
  }
  TORCH_CHECK(!has_device_tensor || on_cpu.empty(),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and cpu! (when checking argument ", on_cpu, " in ", name, ")");
  return has_device_tensor || makes_tensor;
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const bool on_device = check_arguments(op, *stack, begin);
  Aliases aliases;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[begin + i];
    replace_tensors(value, [&](const at::Tensor& tensor) { return aliases.to_cpu(tensor); });
    if (value.isDevice() && value.toDevice().is_cuda())
      value = c10::IValue(c10::Device(c10::DeviceType::CPU));
    if (schema.arguments()[i].name() == "generator") value = c10::IValue(generator);
  }
  launch(full_name(op.operator_name()));
  if (WAITS.count(schema.name())) wait(full_name(op.operator_name()));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.resize_originals();
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    replace_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      return on_device || aliases.is_original(tensor) ? aliases.from_cpu(tensor) : tensor;
    });
  }
}

// ---- The few operators that meet the CPU ----------------------------------------------------------

at::TensorOptions cpu_options(std::optional<at::ScalarType> dtype) {
  const auto default_dtype = c10::typeMetaToScalarType(at::get_default_dtype());
  return at::TensorOptions().dtype(dtype.value_or(default_dtype)).device(at::kCPU);
}

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device>,
                               std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return to_device(at::empty(C10_AS_INTARRAYREF_SLOW(size), cpu_options(dtype), format));
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return to_device(at::empty_strided(C10_AS_INTARRAYREF_SLOW(size),
                                     C10_AS_INTARRAYREF_SLOW(stride), cpu_options(dtype)));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool crosses = self.is_cuda() != source.is_cuda();
  const std::string name = !crosses ? "aten::copy_" : self.is_cuda() ? "copy to device" : "copy to host";
  launch(name);
  if (crosses && !non_blocking && self.numel()) wait(name);
  at::AutoDispatchBelowADInplaceOrView below;
  Aliases aliases;
  aliases.to_cpu(self).copy_(aliases.to_cpu(source));
  return self;
}

at::Scalar item(const at::Tensor& self) {
  launch("copy to host");
  wait("item");
  at::AutoDispatchBelowADInplaceOrView below;
  Aliases aliases;
  return at::_local_scalar_dense(aliases.to_cpu(self));
}

int64_t choose_plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const std::optional<at::Tensor>&, double, bool,
                               std::optional<double>, bool) {
  return 0;
}

// ---- Installation ---------------------------------------------------------------------------------

const Names OWN = {"aten::empty.memory_format", "aten::empty_strided", "aten::copy_",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice"};
const Names VIEWS = {"aten::view", "aten::as_strided", "aten::_reshape_alias", "aten::unfold",
    "aten::view_as_real", "aten::view_as_complex", "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor"};

// Replace the device "cuda" of this process, for its remaining life; return the number of operators.
int install(const std::vector<std::string>& scalar_operators) {
  takes_scalars.insert(scalar_operators.begin(), scalar_operators.end());
  const auto type = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[type].store(&guard);
  c10::SetAllocator(c10::DeviceType::CUDA, &memory, /*priority=*/255);
  // torch has made its own object already: give it our virtual functions
  const at::CUDAHooksInterface& torchs = at::detail::getCUDAHooks();
  std::memcpy((void*)&torchs, (void*)&hooks, sizeof(void*));

  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__,
                                __LINE__);
  int replaced = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto full = full_name(name);
    if (full.rfind("aten::", 0) != 0 || VIEWS.count(full) || OWN.count(full)) continue;
    const auto op = dispatcher.findSchema(name);
    const bool convolves = full == "aten::convolution" || full == "aten::convolution_backward";
    if (!op || !(convolves || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))) continue;
    library.impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    replaced++;
  }
  library.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_local_scalar_dense", TORCH_FN(item));
  library.impl("_fused_sdp_choice", TORCH_FN(choose_plain_attention));
  return replaced;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("count", [](bool on) { counts = on; });
  m.def("reset", []() { launches.clear(); });
  m.def("launches", []() { return launches; });
  m.def("wait", [](const std::string& reason) { wait(reason); });
  m.def("refuse_to_wait", [](bool on) { refuses_to_wait = on; });
  m.def("refuses_to_wait", []() { return refuses_to_wait; });
  m.def("on_wait", [](py::object function) {
    delete on_wait;
    on_wait = new py::object(std::move(function));
  });
  m.def("seed", [](int64_t seed) { generator.set_current_seed(static_cast<uint64_t>(seed)); });
  m.def("get_state", []() { return generator.get_state(); });
  m.def("set_state", [](const at::Tensor& state) { generator.set_state(state); });
}
