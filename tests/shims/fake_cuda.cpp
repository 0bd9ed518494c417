// Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
//
// A device "cuda" for a CPU build of torch: its memory is the host's, and its operators are those of the CPU. What a GPU
// would refuse raises here, too: operators whose tensors are on both devices. What would make the host wait for a GPU,
// what is copied between the two, and each operator are reported to a Python function (`fake_cuda.py`).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

// Reports

py::object* listener = nullptr;
thread_local int unreported = 0;  // above 0 within one kernel of a GPU

struct Unreported {
  Unreported() { ++unreported; }
  ~Unreported() { --unreported; }
};

void report(const char* kind, const std::string& what, int64_t bytes = 0, bool waits = false) {
  if (unreported || !listener) return;
  py::gil_scoped_acquire gil;
  (*listener)(kind, what, bytes, waits);
}

// Memory

std::mutex mutex;
std::map<const char*, size_t> pinned;  // sizes of the blocks that start here
std::atomic<int64_t> allocated{0}, peak{0};
constexpr size_t LINE = 64;  // bytes; the size of a block stands in the line before it

void* aligned(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, LINE, size) == 0, "no memory left");
  return memory;
}

void free_block(void* block) {
  auto memory = static_cast<char*>(block) - LINE;
  allocated -= *reinterpret_cast<int64_t*>(memory);
  free(memory);
}

void free_pinned(void* block) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<const char*>(block));
  }
  free(block);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  auto block = std::prev(next);
  return data < block->first + block->second;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = static_cast<char*>(aligned(size + LINE));
    *reinterpret_cast<int64_t*>(memory) = size;
    allocated += size;
    peak = std::max(peak.load(), allocated.load());
    return {memory + LINE, memory + LINE, &free_block, c10::Device(CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = aligned(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<const char*>(memory)] = size;
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_memory;

// The device: one, with one stream, on which everything has ended once it was started

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CUDA;
  explicit Guard(c10::DeviceType = CUDA) {}
  c10::Device own() const { return c10::Device(CUDA, 0); }
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, own()); }

  c10::DeviceType type() const override { return CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return own(); }
  c10::Device exchangeDevice(c10::Device) const override { return own(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool queryEvent(void*) const override { return true; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream&) const override { report("sync", "stream", 0, true); }
  void synchronizeEvent(void*) const override { report("sync", "event", 0, true); }
  void synchronizeDevice(const c10::DeviceIndex) const override { report("sync", "device", 0, true); }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, 0); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const override { report("sync", "device", 0, true); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

// Operators

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::empty(tensor.sizes(), options);
  auto data = tensor.unsafeGetTensorImpl()->storage().mutable_data();
  auto kept = [](void*) {};
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.storage_offset(), kept, options, at::Device(at::kCPU));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.device() != source.device()) {
    const auto& host = self.is_cpu() ? self : source;
    bool pinned = host.numel() && is_pinned(host.const_data_ptr());
    auto what = std::string(toString(host.scalar_type())) + (pinned ? " pinned" : " pageable");
    report(self.is_cpu() ? "download" : "upload", what, host.nbytes(), host.numel() && !(pinned && non_blocking));
  } else {
    report("operator", "aten::copy_");
  }
  Unreported kernel;
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  Unreported kernel;
  auto& resized = const_cast<at::Tensor&>(to);
  if (resized.sizes() != self.sizes()) resized.resize_(self.sizes());
  resized.copy_(self);
  return to;
}

at::Scalar item(const at::Tensor& self) {
  report("sync", "aten::item", self.itemsize(), true);
  Unreported kernel;
  return on_cpu(self).item();
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt, true);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {size}, {1});
}

// The sizes of their results depend on data, which the host has to read
const std::set<std::string> WAITING = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::histc"};
const std::set<std::string> BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

void look(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  bool has_device = false, has_host = false, has_mask = false;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    has_device |= tensor.is_cuda();
    has_host |= tensor.is_cpu() && tensor.dim();
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList()) for (const at::Tensor& each : value.toTensorVector()) see(each);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
        if (each && each->defined()) see(*each), has_mask |= each->scalar_type() == at::kBool;
  }
  bool by_index = BY_INDEX.count(name);  // indices on the host are uploaded
  TORCH_CHECK(!has_device || !has_host || by_index, "Expected all tensors to be on the same device: ", name);
  report("operator", name);
  if (has_device && has_host) report("upload", name + "'s index", 0, true);
  has_mask &= name != "aten::index";  // which calls `nonzero`
  if (WAITING.count(name) || (by_index && has_mask)) report("sync", name, 0, true);
}

at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  auto dtype = tensor.scalar_type();
  at::Tensor copy = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &device_memory, keys, dtype);
  on_cpu(copy).copy_(tensor);
  return copy;
}

// Whether an operator can run on views of its arguments' memory: it returns no view of them, and resizes none
bool runs_on_views(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  for (const auto& result : schema.returns()) {
    bool is_view = result.alias_info() && !result.alias_info()->isWrite();
    if (is_view || result.type()->kind() != c10::TypeKind::TensorType) return false;
  }
  auto values = torch::jit::last(stack, schema.arguments().size());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && (!alias->isWrite() || !values[i].isTensor() || !values[i].toTensor().numel())) return false;
  }
  return true;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!unreported) look(op, *stack);
  Unreported kernel;
  const auto& schema = op.schema();
  if (!runs_on_views(schema, *stack)) return at::native::cpu_fallback(op, stack);  // copies its arguments
  std::vector<at::Tensor> written;
  auto value = stack->end() - schema.arguments().size();
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info()) written.push_back(value->toTensor());
    if (value->isTensor()) {
      if (value->toTensor().defined()) *value = on_cpu(value->toTensor());
    } else if (value->isTensorList()) {
      auto tensors = value->toTensorVector();
      for (auto& tensor : tensors) tensor = on_cpu(tensor);
      *value = tensors;
    } else if (value->isOptionalTensorList()) {
      auto tensors = value->toOptionalTensorList().vec();
      for (auto& tensor : tensors)
        if (tensor && tensor->defined()) tensor = on_cpu(*tensor);
      *value = tensors;
    } else if (value->isDevice()) {
      *value = at::Device(at::kCPU);
    }
    ++value;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto result = stack->end() - schema.returns().size();
  auto next = written.begin();
  for (const auto& returned : schema.returns()) {
    *result = returned.alias_info() ? *next++ : on_device(result->toTensor());
    ++result;
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_", TORCH_FN(at::native::set_cpu_));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TRIM_THRESHOLD, 1 << 30);  // page faults took half of the time
  c10::SetAllocator(CUDA, &device_memory, 100);
  module.def("listen", [](py::object function) { listener = function.is_none() ? nullptr : new py::object(function); });
  module.def("unreported", [](int by) { unreported += by; });
  module.def("allocated", [] { return allocated.load(); });
  module.def("peak", [] { return peak.load(); });
  module.def("reset_peak", [] { peak = allocated.load(); });
}
