// "tide": a device for tests, in host memory, that behaves like an accelerator.
//
// Two devices. Each has an allocator that counts bytes and refuses what is above a limit, and a generator. Tensors have
// storages of their own; views and allocation are done here, and every other operation is run by the CPU's kernel on the
// same memory, so its numbers are the CPU's to the last bit. Like a GPU it refuses operands on different devices, runs
// backwards on threads of its own, and takes note of whatever makes the host wait: values that are read, copies to the
// host, synchronisation, operations whose result has a size that depends on values.
//
// It computes at once, but copies late: a copy between a device and pinned memory that need not block waits in its stream
// until something waits for that stream, so that who does not wait finds the numbers of before. Memory that is freed while
// another stream has yet to copy from or to it is filled with rubbish, unless that stream was recorded. What takes time is
// counted by a clock of its own.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr int kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// --- what a device counts

struct Counts {
  int64_t reads = 0;      // values read by the host: item(), equal, sizes that depend on values
  int64_t to_host = 0;    // copies to the host
  int64_t from_host = 0;  // copies from the host
  int64_t syncs = 0;      // synchronisations
  int64_t operations = 0;
  int64_t hazards = 0;  // memory freed while a stream that nobody had recorded was about to use it
};

struct Task {
  std::function<void()> run;
  std::vector<std::shared_ptr<void>> memory;  // what it reads and writes
};

struct Stream {
  std::deque<Task> tasks;
  int64_t submitted = 0, finished = 0;
  double seconds = 0;  // until which it is busy
};

struct State {
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t limit = 0;  // bytes; 0 for none
  Counts counts;
  std::map<int64_t, Stream> streams;
};

std::recursive_mutex turn;  // for everything that devices share
State states[kDevices];
double host_seconds = 0;  // the host's clock, which stands still but where it waits for a device
double bytes_per_second = 1e9, flops_per_second = 1e11, link_bytes_per_second = 1e8;

thread_local c10::DeviceIndex current = 0;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

template <typename Change>
void count(c10::DeviceIndex device, Change change) {
  std::lock_guard<std::recursive_mutex> guard(turn);
  change(states[device].counts);
}

thread_local int64_t current_streams[kDevices] = {};

Stream& stream_of(c10::DeviceIndex device) { return states[device].streams[current_streams[device]]; }

// A stream has more to do; it begins when the host tells it to, or when it is done with what came before.
void work(c10::DeviceIndex device, double seconds) {
  std::lock_guard<std::recursive_mutex> guard(turn);
  auto& stream = stream_of(device);
  stream.seconds = std::max(stream.seconds, host_seconds) + seconds;
}

// Do what waits in a stream, up to and with this task.
void drain(Stream& stream, int64_t until) {
  std::lock_guard<std::recursive_mutex> guard(turn);
  while (!stream.tasks.empty() && stream.finished < until) {
    auto task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    ++stream.finished;
    task.run();
  }
}

void wait(Stream& stream) {
  std::lock_guard<std::recursive_mutex> guard(turn);
  drain(stream, stream.submitted);
  host_seconds = std::max(host_seconds, stream.seconds);
}

void wait(c10::DeviceIndex device) { wait(stream_of(device)); }

// What is computed in a stream comes after what waits there.
void come_after(c10::DeviceIndex device) {
  auto& stream = stream_of(device);
  drain(stream, stream.submitted);
}

// --- memory

struct Block {
  c10::DeviceIndex device;
  size_t size;
  int64_t stream;  // that it was allocated in; what that does comes before what the memory is used for next
  std::shared_ptr<void> memory;
  std::set<int64_t> recorded;
};

std::unordered_map<void*, Block> blocks;

bool waits_for(const Stream& stream, const std::shared_ptr<void>& memory) {
  for (const auto& task : stream.tasks) {
    if (std::find(task.memory.begin(), task.memory.end(), memory) != task.memory.end()) return true;
  }
  return false;
}

struct TideAllocator final : public c10::DeviceAllocator {
  static void free(void* pointer) {
    if (pointer == nullptr) return;
    std::lock_guard<std::recursive_mutex> guard(turn);
    const auto found = blocks.find(pointer);
    const Block block = std::move(found->second);
    blocks.erase(found);
    auto& state = states[block.device];
    for (auto& [id, stream] : state.streams) {
      if (id == block.stream || !waits_for(stream, block.memory)) continue;
      if (block.recorded.count(id) > 0) {  // its bytes are free when that stream has come so far
        stream.tasks.push_back({[&state, block] { give_back(state, block.size); }, {}});
        ++stream.submitted;
        return;
      }
      ++state.counts.hazards;
      std::memset(pointer, 0xFF, block.size);
    }
    give_back(state, block.size);
  }

  static void give_back(State& state, size_t size) { state.stats.allocated_bytes[kAll].decrease(size); }

  c10::DataPtr allocate_on(c10::DeviceIndex device, size_t size) {
    std::lock_guard<std::recursive_mutex> guard(turn);
    auto& state = states[device];
    auto& allocated = state.stats.allocated_bytes[kAll];
    if (state.limit > 0 && allocated.current + static_cast<int64_t>(size) > state.limit) {
      ++state.stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "tide:", static_cast<int>(device), " out of memory: tried to allocate ", size,
          " bytes with ", allocated.current, " of ", state.limit, " in use");
    }
    void* pointer = size > 0 ? c10::alloc_cpu(size) : nullptr;
    if (pointer != nullptr) {
      const std::shared_ptr<void> memory(pointer, [](void* each) { c10::free_cpu(each); });
      blocks[pointer] = {device, size, current_streams[device], memory, {}};
      allocated.increase(size);
    }
    return {pointer, pointer, &free, c10::Device(kType, device)};
  }

  c10::DataPtr allocate(size_t size) override { return allocate_on(current, size); }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> guard(turn);
    const auto found = blocks.find(pointer.get());
    if (found != blocks.end()) found->second.recorded.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> guard(turn);
    return states[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> guard(turn);
    states[device].stats.allocated_bytes[kAll].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> guard(turn);
    states[device].stats.allocated_bytes[kAll].reset_peak();
  }
};

TideAllocator allocator;

// The host's memory that copies may be late in: a copy that waits keeps it.
struct PinnedAllocator final : public c10::Allocator {
  static void free(void* pointer) {
    std::lock_guard<std::recursive_mutex> guard(turn);
    live -= sizes.at(pointer);
    sizes.erase(pointer);
    memory.erase(pointer);
  }
  c10::DataPtr allocate(size_t size) override {
    void* pointer = c10::alloc_cpu(std::max<size_t>(size, 1));
    std::lock_guard<std::recursive_mutex> guard(turn);
    memory.emplace(pointer, std::shared_ptr<void>(pointer, [](void* each) { c10::free_cpu(each); }));
    sizes[pointer] = size;
    live += static_cast<int64_t>(size);
    peak = std::max(peak, live);
    return {pointer, pointer, &free, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }

  static inline std::map<const void*, std::shared_ptr<void>> memory;
  static inline std::map<const void*, size_t> sizes;
  static inline int64_t live = 0, peak = 0;
};

PinnedAllocator pinned;

std::shared_ptr<void> pinned_memory(const void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(turn);
  auto found = PinnedAllocator::memory.upper_bound(pointer);
  if (found == PinnedAllocator::memory.begin()) return nullptr;
  --found;
  const auto* begin = static_cast<const char*>(found->first);
  return pointer < begin + std::max<size_t>(PinnedAllocator::sizes.at(found->first), 1) ? found->second : nullptr;
}

// --- devices and streams

struct TideGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current; }
  static c10::Stream numbered(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return numbered(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return numbered(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> last{0};
    return numbered(device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  static Stream& found(const c10::Stream& stream) { return states[stream.device_index()].streams[stream.id()]; }
  bool queryStream(const c10::Stream& stream) const override { return found(stream).tasks.empty(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count(stream.device_index(), [](Counts& counts) { ++counts.syncs; });
    wait(found(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const auto which = device < 0 ? current : device;
    count(which, [](Counts& counts) { ++counts.syncs; });
    std::lock_guard<std::recursive_mutex> guard(turn);
    for (auto& [id, stream] : states[which].streams) wait(stream);
  }

  struct Event {
    c10::DeviceIndex device;
    Stream* stream;
    int64_t submitted;
    double seconds;
  };
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(turn);
    if (*event == nullptr) *event = new Event();
    auto& of = found(stream);
    *static_cast<Event*>(*event) = {stream.device_index(), &of, of.submitted, of.seconds};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    std::lock_guard<std::recursive_mutex> guard(turn);
    const auto until = *static_cast<Event*>(event);
    auto& waiting = found(stream);
    waiting.seconds = std::max(waiting.seconds, until.seconds);
    if (until.stream->finished >= until.submitted || until.stream == &waiting) return;
    waiting.tasks.push_back({[until] { drain(*until.stream, until.submitted); }, {}});
    ++waiting.submitted;
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::lock_guard<std::recursive_mutex> guard(turn);
    const auto* until = static_cast<Event*>(event);
    return until->stream->finished >= until->submitted;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    std::lock_guard<std::recursive_mutex> guard(turn);
    const auto* until = static_cast<Event*>(event);
    count(until->device, [](Counts& counts) { ++counts.syncs; });
    drain(*until->stream, until->submitted);
    host_seconds = std::max(host_seconds, until->seconds);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator.recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, TideGuard);

// --- generators: the CPU's, one for each device

struct TideGenerator final : public c10::GeneratorImpl {
  explicit TideGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kType, device), kKeys), cpu(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu).seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  TideGenerator* clone_impl() const override {
    auto* twin = new TideGenerator(device().index());
    twin->cpu = cpu.clone();
    return twin;
  }

  at::Generator cpu;
};

at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int k = 0; k < kDevices; ++k) made.push_back(at::make_generator<TideGenerator>(k));
    return made;
  }();
  return generators[device < 0 ? current : device];
}

at::Generator& cpu_of(const at::Generator& generator) {
  return static_cast<TideGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

// --- what torch asks of an accelerator

struct TideHooks final : public at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current;
    if (device >= 0) current = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return pinned_memory(pointer) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<TideGenerator>(device < 0 ? current : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = allocator.allocate_on(storage.device().index(), size);
    if (const auto kept = std::min(size, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

// --- allocation, views and copies

c10::DeviceIndex index_of(std::optional<at::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current;
}

// Allocation by torch's own functions asks the allocator, which asks for the current device.
struct On {
  explicit On(c10::DeviceIndex device) : before(current) { current = device; }
  ~On() { current = before; }
  c10::DeviceIndex before;
};

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const On on(index_of(device));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const On on(index_of(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU, which may grow a storage of its own.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto* begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  const auto alias = at::for_blob(begin, tensor.sizes())
                         .strides(tensor.strides())
                         .options(at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
                         .target_device(at::Device(at::kCPU))
                         .resizeable_storage()
                         .allocator(c10::GetCPUAllocator())
                         .make_tensor();
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

std::shared_ptr<void> memory_of(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return pinned_memory(tensor.storage().data());
  std::lock_guard<std::recursive_mutex> guard(turn);
  return blocks.at(tensor.storage().mutable_data()).memory;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  const double bytes = static_cast<double>(to.nbytes());
  if (to.is_privateuseone() && from.is_privateuseone()) {
    const auto device = to.device().index();
    count(device, [](Counts& counts) { ++counts.operations; });
    come_after(from.device().index());
    come_after(device);
    work(device, 2 * bytes / (from.device() == to.device() ? bytes_per_second : link_bytes_per_second));
    on_cpu(to).copy_(on_cpu(from));
    return to;
  }
  const bool is_up = to.is_privateuseone();
  const auto device = (is_up ? to : from).device().index();
  work(device, bytes / link_bytes_per_second);
  const auto memory = memory_of(is_up ? from : to);
  if (non_blocking && memory != nullptr) {
    std::lock_guard<std::recursive_mutex> guard(turn);
    auto& stream = stream_of(device);
    stream.tasks.push_back(
        {[to = on_cpu(to), from = on_cpu(from)] { at::Tensor(to).copy_(from); }, {memory, memory_of(is_up ? to : from)}});
    ++stream.submitted;
    return to;
  }
  count(device, [is_up](Counts& counts) { ++(is_up ? counts.from_host : counts.to_host); });
  wait(device);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  const size_t need = (impl->numel() + impl->storage_offset()) * self.itemsize();
  if (need > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  count(tensor.device().index(), [](Counts& counts) { ++counts.reads; });
  wait(tensor.device().index());
  return on_cpu(tensor).item();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const On on(self.device().index());
  const auto none = empty({0}, c10::typeMetaToScalarType(self.dtype()), {}, self.device(), {}, {});
  return set_storage(self, none.storage(), 0, {0}, {1});
}

at::Tensor& set_whole(at::Tensor& self, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {1});
}

// --- every other operation: the CPU's kernel, on the same memory

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto count_arguments = op_.schema().arguments().size();
    const auto begin = stack_->size() - count_arguments;
    for (size_t k = 0; k < count_arguments; ++k) find_device((*stack_)[begin + k]);
    device_ = device_ < 0 ? current : device_;
    for (size_t k = 0; k < count_arguments; ++k) {
      auto& value = (*stack_)[begin + k];
      replace(value, op_.schema().arguments()[k]);
    }
    come_after(device_);
    const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    run_kernel(draws && !has_generator_);
    bool waits = op_.hasTag(at::Tag::dynamic_output_shape);
    const auto count_returns = op_.schema().returns().size();
    for (auto k = stack_->size() - count_returns; k < stack_->size(); ++k) {
      waits |= !((*stack_)[k].isTensor() || (*stack_)[k].isTensorList() || (*stack_)[k].isNone());
      give((*stack_)[k]);
    }
    count(device_, [waits](Counts& counts) {
      ++counts.operations;
      counts.reads += waits;
    });
    work(device_, bytes_ / bytes_per_second + flops() / flops_per_second);
    if (waits) wait(device_);
  }

 private:
  void find_device(const c10::IValue& value) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.is_privateuseone()) return;
      if (device_ >= 0 && device_ != tensor.device().index()) refuse("on two devices");
      device_ = tensor.device().index();
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) find_device(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) find_device(element);
    } else if (value.isDevice() && device_ < 0 && value.toDevice().is_privateuseone()) {
      device_ = index_of(value.toDevice());
    }
  }

  void refuse(const char* why) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", op_.schema().name(), " got some ", why);
  }

  at::Tensor taken(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      const auto& name = op_.schema().name();
      if (tensor.dim() > 0 && tensor.is_cpu() && name.find("index") == std::string::npos) refuse("on the CPU");
      return tensor;
    }
    bytes_ += static_cast<double>(tensor.nbytes());
    auto alias = on_cpu(tensor);
    aliases_.push_back({tensor, alias, alias.storage().data()});
    return alias;
  }

  void replace(c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = taken(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(taken(tensor));
      value = std::move(list);
    } else if (value.isList() && holds_tensors(value)) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& element : value.toListRef()) {
        list.push_back(element.isNone() ? std::nullopt : std::make_optional(taken(element.toTensor())));
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = cpu_of(value.toGenerator());
      has_generator_ = true;
    } else if (value.isNone() && is_generator(argument)) {
      value = cpu_of(default_generator(device_));
      has_generator_ = true;
    }
  }

  static bool holds_tensors(const c10::IValue& value) {
    const auto type = value.type()->castRaw<c10::ListType>()->getElementType();
    return type->isSubtypeOf(*c10::OptionalType::ofTensor());
  }

  static bool is_generator(const c10::Argument& argument) {
    const auto type = argument.type();
    return type->kind() == c10::TypeKind::OptionalType &&
        type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  // Backends are asked for convolutions under names that the CPU does not know.
  void run_convolution() {
    const bool is_backward = op_.schema().name() == "aten::convolution_backward_overrideable";
    if (is_backward) {
      const auto place = stack_->end() - static_cast<int64_t>(op_.schema().arguments().size());
      stack_->insert(place + 3, c10::List<int64_t>({place->toTensor().size(1)}));  // the bias has as many channels
    }
    const char* name = is_backward ? "aten::convolution_backward" : "aten::convolution";
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack_);
  }

  // Some operations draw from the CPU's generator without being given it: it takes this device's place for a moment.
  void run_kernel(bool draws_unasked) {
    if (op_.schema().name().rfind("aten::convolution_", 0) == 0) {
      run_convolution();
      return;
    }
    if (!draws_unasked) {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
      return;
    }
    auto cpus = at::detail::getDefaultCPUGenerator();
    auto& ours = cpu_of(default_generator(device_));
    const auto aside = cpus.get_state();
    cpus.set_state(ours.get_state());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    ours.set_state(cpus.get_state());
    cpus.set_state(aside);
  }

  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = given(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(given(tensor));
      value = std::move(list);
    }
  }

  at::Tensor given(const at::Tensor& result) {
    if (!result.defined() || result.is_privateuseone()) return result;
    for (const auto& [tensor, alias, begin] : aliases_) {
      if (alias.is_same(result)) return updated(tensor, alias, begin);
    }
    for (const auto& [tensor, alias, begin] : aliases_) {
      if (alias.storage().is_alias_of(result.storage())) {
        const auto offset = tensor.storage_offset() + result.storage_offset();
        return at::native::as_strided_tensorimpl(tensor, result.sizes(), result.strides(), offset);
      }
    }
    auto twin = empty_strided(
        result.sizes(), result.strides(), c10::typeMetaToScalarType(result.dtype()), {}, c10::Device(kType, device_), {});
    bytes_ += static_cast<double>(result.nbytes());
    if (result.numel() > 0) on_cpu(twin).copy_(result);
    return twin;
  }

  // An argument that was changed in place: the kernel may have given it another size, and so a storage of its own.
  static at::Tensor updated(const at::Tensor& tensor, const at::Tensor& alias, const void* begin) {
    if (alias.storage().data() != begin) {
      resize_(tensor, alias.sizes(), std::nullopt);
      on_cpu(tensor).copy_(alias);
    }
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
    return tensor;
  }

  double flops() const {
    const auto& name = op_.schema().name();
    if (name != "aten::mm" && name != "aten::addmm" && name != "aten::bmm") return 0;
    const auto& left = aliases_[aliases_.size() - 2].alias;
    const auto& right = aliases_.back().alias;
    return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
  }

  struct Alias {
    at::Tensor tensor, alias;
    const void* begin;
  };

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<Alias> aliases_;
  c10::DeviceIndex device_ = -1;
  bool has_generator_ = false;
  double bytes_ = 0;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    allocator.recordStream(self.storage().data_ptr(), stream);
  });
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("set_", &set_empty);
  library.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  library.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  library.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  for (const char* name : {"convolution_overrideable", "convolution_backward_overrideable"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  library.impl("unfold", [](const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  // What most models need of what torch casts on a GPU.
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kType, &allocator);
  static TideHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("set_limit", [](c10::DeviceIndex device, int64_t bytes) { states[device].limit = bytes; });
  module.def("counts", [](c10::DeviceIndex device) {
    std::lock_guard<std::recursive_mutex> guard(turn);
    const auto& counts = states[device].counts;
    return std::map<std::string, int64_t>{
        {"reads", counts.reads}, {"to_host", counts.to_host}, {"from_host", counts.from_host},
        {"syncs", counts.syncs}, {"operations", counts.operations}, {"hazards", counts.hazards}};
  });
  module.def("default_generator", [](c10::DeviceIndex device) { return default_generator(device); });
  module.def("host_seconds", [] { return host_seconds; });
  module.def("pinned_bytes", [] { return std::pair(PinnedAllocator::live, PinnedAllocator::peak); });
  module.def("exchange_device", [](c10::DeviceIndex device) {
    const auto before = current;
    if (device >= 0) current = device;
    return before;
  });
}
