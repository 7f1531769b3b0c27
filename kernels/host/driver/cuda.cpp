// The functions of the CUDA driver that Candle and its crate cudarc call, on the CPU.
//
// Device memory is host memory, kernels are C++ functions from shared libraries, and a stream is a
// queue. The GPU has compute capability 8.0 and the attributes below. Environment variables change
// it, or how the work is done:
//
// CUDA_ON_HOST_DEVICES=n There are n GPUs, at most 8. Without it there is one.
// CUDA_ON_HOST_HOPPER=1 The GPU has compute capability 9.0, and modules have its kernels.
// CUDA_FORCE_PTX_JIT=1  Modules have the kernels of their PTX, which are those for 8.0.
// CUDA_ON_HOST_LAZY=1   A stream works only when a call waits for it; else it works at once.
// CUDA_ON_HOST_RACES=1  A race between the threads of a launch is an error, in modules that nvcc has compiled with --races.
// CUDA_ON_HOST_ORDER=n  The order of the threads of a block, as in cuda_host_launch.
// CUDA_ON_HOST_MAPS=0   The GPU has no virtual memory management.
//
// Memory starts as 0xff in each byte, which is NaN in every float type. An inaccessible page
// follows each allocation. Freed memory stays inaccessible for some time.
//
// An allocation of cuMemAlloc can be opened by other processes. Its pages then become those of a
// file without a name, which they map. Only one that no process has open can be freed.
//
// Memory of cuMemCreate is mapped to a reserved range from the start of the range, without gaps. What is mapped and accessible counts as
// one allocation. It can be unmapped from its end, once the host has waited for all work that uses it. CUDA allows more.
//
// Work that uses an allocation must be ordered after the last write of it, and a write after the
// last reads too: by its stream, an event, or a wait of the host. Other work is an error, in every
// mode. No stream waits for the default stream. Kernels use the memory of their pointer arguments,
// and write it unless the argument points to constants, or has the address in a table.

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver.h"
#include "module.h"

extern "C" {
const char* cuda_host_launch(const unsigned grid[3], const unsigned block[3], size_t shared_bytes, unsigned order, bool is_loop,
                             bool finds_races, void (*body)(void*), void* argument);
void* cuda_host_buffer(size_t bytes);
void cuda_host_free(void* buffer, size_t bytes);
extern thread_local const char* cuda_host_kernel;
extern thread_local uint64_t cuda_host_race;
}

typedef int CUresult;
typedef uint64_t CUdeviceptr;

namespace {

using cuda_host::Access;
using cuda_host::Kernel;
using cuda_host::Use;

enum : CUresult {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    ASSERT = 710,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
};

bool is_hopper() {
    static const bool is = getenv("CUDA_ON_HOST_HOPPER") != nullptr;
    return is;
}

// CUdevice_attribute
enum {
    MAX_THREADS = 1,
    WARP_SIZE = 10,
    MULTIPROCESSORS = 16,
    MAJOR = 75,
    MINOR = 76,
    VIRTUAL_MEMORY_MANAGEMENT = 102,
    MEMORY_POOLS = 115
};

// Of each GPU.
constexpr size_t total_memory = (size_t)8 << 30;
constexpr unsigned most_devices = 8;
constexpr size_t page = 4096;
// Freed allocations that stay inaccessible. Those of few pages come back afterwards, because the system takes longer to map a page
// than a kernel of a test to fill it.
constexpr size_t graveyard = 4096, few_pages = 8, graveyard_of_size = graveyard / few_pages;
// Shared memory of a block without and with the attribute of the kernel.
constexpr unsigned shared_default = 48 << 10, shared_most = 227 << 10;

struct Function {
    const Kernel* kernel;
    int device;
    bool is_loop;
    unsigned shared_bytes = shared_default;
};
struct Module {
    std::unordered_map<std::string, Function> functions;
};
// Work of a stream. `name` names it in errors.
struct Work {
    const char* name;
    std::vector<Use> uses;
    bool is_copy;  // which may use the memory of two GPUs
    std::function<void()> run;
};
// Recorded work, and the memory that it allocates and frees. The graph has the memory until cuDeviceGraphMemTrim, and from each launch
// on.
struct Graph {
    std::vector<Work> work;
    std::vector<CUdeviceptr> allocations;
    bool is_trimmed = false;
    Graph();
    ~Graph();
};
std::set<Graph*> graphs;

// The number of calls of each stream, by its id, that come before a point of the program.
struct Clock {
    std::vector<uint64_t> counts;

    void set(size_t stream, uint64_t count) {
        if (counts.size() <= stream) counts.resize(stream + 1);
        counts[stream] = std::max(counts[stream], count);
    }
    bool has(size_t stream, uint64_t count) const { return stream < counts.size() && counts[stream] >= count; }
    void merge(const Clock& other) {
        for (size_t stream = 0; stream < other.counts.size(); stream++) set(stream, other.counts[stream]);
    }
};
struct Stream {
    int device = 0;
    size_t id = 0;  // 0 before its first work
    std::deque<std::function<void()>> work;
    uint64_t issued = 0, done = 0;
    Clock clock;
    std::shared_ptr<Graph> recording;  // null unless the stream records
};
struct Event {
    Stream* stream = nullptr;
    uint64_t at = 0;
    Clock clock;
};
// The place of work: a call of a stream.
struct Place {
    size_t stream;
    uint64_t at;
    const char* name;
};
struct Allocation {
    size_t bytes;
    int device;
    bool is_freed = false;   // by a call that may not have run yet
    bool is_pooled = false;  // of cuMemAllocAsync
    int file = -1;           // with its pages, once other processes can open it
    bool is_opened = false;  // of another process, which has the file
    bool is_mapped = false;  // to a reserved range
    Place written = {0, 0, nullptr};
    std::vector<Place> reads = {};  // the last one of each stream since the write
};
// Memory of cuMemCreate, until it is neither mapped nor held by its handle.
struct Physical {
    size_t bytes;
    int device;
    bool is_held = true, is_mapped = false;
};
struct Mapping {
    size_t bytes;
    uint64_t handle;
    bool is_accessible;
};
// Reserved addresses, and what is mapped to them from the start.
struct Range {
    size_t bytes, mapped = 0;
    std::vector<Mapping> mappings = {};
};
// A GPU is its own context and its own pool of memory.
struct Device {
    size_t used_bytes = 0, peak_bytes = 0;
    uint64_t pool_threshold = 0;
    Stream default_stream;
};

std::recursive_mutex lock;
std::map<CUdeviceptr, Allocation> memory;
std::map<uint64_t, Physical> physical;
uint64_t handles;
std::map<CUdeviceptr, Range> ranges;
std::deque<std::pair<void*, size_t>> freed;
// Those of few pages, by their number.
std::deque<void*> freed_of[few_pages + 1];
// The bytes of page-locked host memory, by its address.
std::map<const char*, size_t> pinned;
Device devices[most_devices];
std::vector<Stream*> streams;
size_t stream_ids;
// The stream of this thread. On the heap: a program that loads the library late, such as Python, has little thread-local memory.
Stream& thread_stream(int device) {
    static thread_local const std::unique_ptr<Stream[]> all(new Stream[most_devices]);
    return all[(size_t)device];
}
thread_local Device* current_context;
// The work that the host has waited for. A thread that waits for a stream passes its results to
// other threads. One that waits for an event, such as a watchdog, may not.
Clock waited;
thread_local Clock waited_by_thread;
// An error of the work on a stream. It stays, as the error of a broken context does.
CUresult broken = SUCCESS;

unsigned variable(const char* name) {
    const char* text = getenv(name);
    return text == nullptr ? 0 : (unsigned)atoi(text);
}
bool maps() {
    static const bool maps = getenv("CUDA_ON_HOST_MAPS") == nullptr || variable("CUDA_ON_HOST_MAPS") != 0;
    return maps;
}
bool is_lazy() {
    static const bool lazy = variable("CUDA_ON_HOST_LAZY") == 1;
    return lazy;
}

bool finds_races() {
    static const bool finds = variable("CUDA_ON_HOST_RACES") == 1;
    return finds;
}

int device_count() {
    static const unsigned count = [] {
        // An empty list hides all devices, and so does -1 as the first one, as in NVIDIA's driver.
        const char* visible = getenv("CUDA_VISIBLE_DEVICES");
        if (visible != nullptr && (*visible == 0 || strncmp(visible, "-1", 2) == 0)) return 0u;
        return std::min(std::max(variable("CUDA_ON_HOST_DEVICES"), 1u), most_devices);
    }();
    return (int)count;
}
int current_device() { return current_context == nullptr ? 0 : (int)(current_context - devices); }

// Calls of this thread, by name.
thread_local std::map<std::string, uint64_t> calls;
// Operations of NCCL beside which no kernel of this thread was launched so far.
thread_local std::vector<Place> alone;
// Calls of this thread that fail, by name: how many precede them, how many fail, and how many have failed.
struct Failing {
    uint64_t before, count, failed;
};
thread_local std::map<std::string, Failing> failing;

CUresult refuse(CUresult result, const char* format, ...) {
    char text[1200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "cuda_host: %s\n", text);
    return result;
}

Stream* stream_of(void* handle) {
    if (handle != nullptr && handle != (void*)1 && handle != (void*)2) return (Stream*)handle;
    const int device = current_device();
    Stream* stream = handle == (void*)2 ? &thread_stream(device) : &devices[device].default_stream;
    stream->device = device;
    return stream;
}

void run_until(Stream* stream, uint64_t at) {
    while (stream->done < at && !stream->work.empty()) {
        std::function<void()> work = std::move(stream->work.front());
        stream->work.pop_front();
        // After an error a GPU does nothing more.
        if (broken == SUCCESS) work();
        stream->done++;
    }
}

CUresult finish(Stream* stream) {
    run_until(stream, stream->issued);
    return broken;
}

// Waits for a stream, as the host.
CUresult wait_for(Stream* stream) {
    waited.merge(stream->clock);
    return finish(stream);
}

// Calls `each` with the streams of a GPU, except those of other threads.
template <class F>
void for_streams(int device, F each) {
    for (Stream* stream : streams)
        if (stream->device == device) each(stream);
    each(&thread_stream(device));
    each(&devices[device].default_stream);
}

// Returns the allocation that has this address, or the end of `memory`.
std::map<CUdeviceptr, Allocation>::iterator allocation_of(CUdeviceptr address) {
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return memory.end();
    auto found = std::prev(next);
    return address < found->first + found->second.bytes ? found : memory.end();
}

// Checks that the next work of a stream is ordered after the work that used the same memory.
void check_order(const Stream* stream, const Work& work) {
    const Place here = {stream->id, stream->issued, work.name};
    for (const auto& [address, is_write] : work.uses) {
        const auto found = allocation_of(address);
        if (found == memory.end()) continue;
        Allocation* allocation = &found->second;
        if (!work.is_copy && allocation->device != stream->device) {
            broken = refuse(ILLEGAL_ADDRESS, "%s on GPU %d uses %p, which is memory of GPU %d", work.name, stream->device,
                            (void*)address, allocation->device);
            return;
        }
        const auto check = [&, address = address, is_write = is_write](const Place& place, const char* what) {
            if (place.name == nullptr || stream->clock.has(place.stream, place.at)) return;
            broken = refuse(LAUNCH_FAILED, "no order: %s on stream %zu %s %p, and %s on stream %zu %s it: no event or wait is between them",
                            work.name, stream->id, is_write ? "writes" : "reads", (void*)address, place.name, place.stream, what);
        };
        check(allocation->written, "writes");
        auto& reads = allocation->reads;
        if (is_write) {
            for (const Place& read : reads) check(read, "reads");
            reads.clear();
            allocation->written = here;
            continue;
        }
        auto own = std::find_if(reads.begin(), reads.end(), [&](const Place& read) { return read.stream == stream->id; });
        if (own == reads.end()) reads.push_back(here);
        else *own = here;
    }
}

CUresult add(Stream* stream, Work work) {
    if (stream->recording != nullptr) {
        stream->recording->work.push_back(std::move(work));
        return broken;
    }
    if (stream->id == 0) stream->id = ++stream_ids;
    stream->issued++;
    stream->clock.merge(waited);
    stream->clock.merge(waited_by_thread);
    stream->clock.set(stream->id, stream->issued);
    check_order(stream, work);
    stream->work.push_back(std::move(work.run));
    if (!is_lazy()) run_until(stream, stream->issued);
    return broken;
}

// Counts the operations of NCCL that run beside the next kernel of a stream, each once: the stream has not waited for them.
void count_beside(const Stream* stream) {
    const auto is_over = [&](const Place& place) {
        if (place.stream == stream->id) return false;
        if (!stream->clock.has(place.stream, place.at)) calls["nccl beside kernels"]++;
        return true;
    };
    alone.erase(std::remove_if(alone.begin(), alone.end(), is_over), alone.end());
}

size_t pages(size_t bytes) { return (bytes + page - 1) / page; }
// An allocation ends at an inaccessible page, up to the alignment of 16 bytes.
size_t rounded(size_t bytes) { return (bytes + 15) / 16 * 16; }

void protect(void* start, size_t bytes, int access) {
    if (mprotect(start, bytes, access) == 0) return;
    perror("cuda_host: the access to memory");
    abort();
}

// Counts an allocation, and returns whether it fails.
bool allocation_fails() {
    calls["allocation"]++;
    return cuda_host::fails("allocation");
}

// Counts an allocation of a GPU's memory, and returns whether there is enough.
bool take_memory(int device, size_t bytes) {
    Device& of = devices[device];
    if (allocation_fails() || of.used_bytes + bytes > total_memory) return false;
    of.used_bytes += bytes;
    of.peak_bytes = std::max(of.peak_bytes, of.used_bytes);
    return true;
}

CUresult allocate(CUdeviceptr* pointer, size_t bytes, int device) {
    if (bytes == 0) return refuse(INVALID_VALUE, "cuMemAlloc of 0 bytes");
    if (!take_memory(device, bytes)) return OUT_OF_MEMORY;
    const size_t count = pages(rounded(bytes));
    void* start;
    if (count <= few_pages && freed_of[count].size() >= graveyard_of_size) {
        char* first = (char*)freed_of[count].front();
        freed_of[count].pop_front();
        protect(first, count * page, PROT_READ | PROT_WRITE);
        start = first + count * page - rounded(bytes);
    } else {
        start = cuda_host_buffer(rounded(bytes));
    }
    memset(start, 0xff, rounded(bytes));
    *pointer = (CUdeviceptr)start;
    memory[*pointer] = {bytes, device};
    return SUCCESS;
}

// Marks an allocation as freed. Later calls refuse it.
CUresult mark_freed(CUdeviceptr pointer) {
    auto found = memory.find(pointer);
    if (found == memory.end() || found->second.is_freed || found->second.is_mapped)
        return refuse(INVALID_VALUE, "free of %p, which is not an allocation", (void*)pointer);
    found->second.is_freed = true;
    return SUCCESS;
}

// Replaces the mapping of pages.
void map_again(void* start, size_t bytes, int access, int flags, int file) {
    if (mmap(start, bytes, access, flags | MAP_FIXED, file, 0) != MAP_FAILED) return;
    perror("cuda_host: the pages of an allocation");
    abort();
}

// Keeps inaccessible memory for some time.
void bury(void* start, size_t bytes) {
    freed.push_back({start, bytes});
    if (freed.size() <= graveyard) return;
    munmap(freed.front().first, freed.front().second);
    freed.pop_front();
}

void release(CUdeviceptr pointer) {
    auto found = memory.find(pointer);
    const size_t bytes = found->second.bytes, count = pages(rounded(bytes)), whole = count * page;
    void* start = (char*)pointer + rounded(bytes) - whole;
    devices[found->second.device].used_bytes -= bytes;
    if (found->second.file >= 0) {
        map_again(start, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
        close(found->second.file);
    }
    memory.erase(found);
    protect(start, whole, PROT_NONE);
    if (count <= few_pages) {
        freed_of[count].push_back(start);
        return;
    }
    madvise(start, whole, MADV_DONTNEED);
    bury(start, whole + page);
}

// Frees memory that is neither mapped nor held by its handle.
void release_physical(uint64_t handle) {
    const auto found = physical.find(handle);
    if (found->second.is_held || found->second.is_mapped) return;
    devices[found->second.device].used_bytes -= found->second.bytes;
    physical.erase(found);
}

// Returns the range that has this address, or the end of `ranges`.
std::map<CUdeviceptr, Range>::iterator range_of(CUdeviceptr address) {
    const auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) return ranges.end();
    const auto found = std::prev(next);
    return address < found->first + found->second.bytes ? found : ranges.end();
}

// Makes what is mapped to a range and accessible one allocation.
void set_allocation(CUdeviceptr start, const Range& range) {
    size_t bytes = 0;
    for (const Mapping& mapping : range.mappings) {
        if (!mapping.is_accessible) break;
        bytes += mapping.bytes;
    }
    if (bytes == 0) {
        memory.erase(start);
        return;
    }
    const auto there = memory.find(start);
    if (there != memory.end()) {
        there->second.bytes = bytes;
        return;
    }
    Allocation allocation = {bytes, physical.at(range.mappings.front().handle).device};
    allocation.is_mapped = true;
    memory[start] = allocation;
}

// Calls `each` with the device and the size of each allocation of a graph.
template <class F>
void for_allocations(const Graph& graph, F each) {
    for (CUdeviceptr pointer : graph.allocations) each(memory[pointer].device, memory[pointer].bytes);
}

Graph::Graph() { graphs.insert(this); }

Graph::~Graph() {
    graphs.erase(this);
    for (int device = 0; device < device_count(); device++) for_streams(device, finish);
    if (is_trimmed) for_allocations(*this, [](int device, size_t bytes) { devices[device].used_bytes += bytes; });
    for (CUdeviceptr pointer : allocations) release(pointer);
}

// What a process needs to open an allocation of another one. The caller has 64 bytes.
struct IpcHandle {
    int process, file, device, unused;
    uint64_t bytes, inode;
    unsigned char rest[32];
};
static_assert(sizeof(IpcHandle) == 64, "CU_IPC_HANDLE_SIZE");

// The number of a file, which no other file has meanwhile. 0 without a file.
uint64_t inode_of(int file) {
    struct stat found;
    return fstat(file, &found) == 0 ? (uint64_t)found.st_ino : 0;
}

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc.
struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    Location location;
    void* meta_data;
    unsigned char flags[8];
};
struct AccessOf {
    Location location;
    int flags;
};

// Returns whether a location is a GPU: CU_MEM_LOCATION_TYPE_DEVICE is 1.
bool is_device(const Location& location) { return location.type == 1 && location.id >= 0 && location.id < device_count(); }

bool is_pinned(const void* address) {
    const auto next = pinned.upper_bound((const char*)address);
    if (next == pinned.begin()) return false;
    const auto [start, bytes] = *std::prev(next);
    return (const char*)address < start + bytes;
}

// Refuses a call that a stream cannot record.
#define NOT_IN_RECORDING(stream)                             \
    if (stream_of(stream)->recording != nullptr) \
    return refuse(CAPTURE_UNSUPPORTED, "%s while the stream records", __func__)

// Copies the arguments of a launch, because the caller may change them before it runs.
struct Launch {
    const Kernel* kernel;
    std::vector<std::vector<char>> values;
    std::vector<void*> pointers;

    Launch(const Kernel* kernel, void** arguments) : kernel(kernel) {
        for (int i = 0; i < kernel->count; i++) {
            const char* from = (const char*)arguments[i];
            values.emplace_back(from, from + kernel->sizes[i]);
        }
        for (auto& value : values) pointers.push_back(value.data());
    }

    // The memory that the kernel uses. A table that has not been copied to the GPU yet has no
    // addresses.
    std::vector<Use> uses() const {
        std::vector<Use> all;
        for (int i = 0; i < kernel->count; i++) {
            if (kernel->accesses[i] == Access::None) continue;
            const CUdeviceptr address = *(const CUdeviceptr*)pointers[(size_t)i];
            all.push_back({address, kernel->accesses[i] == Access::Write});
            const auto table = allocation_of(address);
            if (kernel->accesses[i] != Access::Table || table == memory.end()) continue;
            const CUdeviceptr end = table->first + table->second.bytes;
            for (CUdeviceptr at = address; at + sizeof at <= end; at += sizeof at) {
                const CUdeviceptr entry = *(const CUdeviceptr*)at;
                if (allocation_of(entry) != memory.end()) all.push_back({entry, true});
            }
        }
        return all;
    }
};

// Counts a call, and holds the lock until the end of the function.
#define CALL                                             \
    std::lock_guard<std::recursive_mutex> guard(lock); \
    calls[__func__]++
// Also refuses a call without a context.
#define CALL_IN_CONTEXT \
    CALL;               \
    if (current_context == nullptr) return refuse(INVALID_CONTEXT, "%s without a current context", __func__)

}  // namespace

void cuda_host::enqueue(void* stream, const char* name, const std::vector<Use>& uses, std::function<void()> work) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    calls[name]++;
    Stream* of = stream_of(stream);
    const bool is_nccl = strcmp(name, "nccl") == 0;
    if (!is_nccl) count_beside(of);
    add(of, {name, uses, false, std::move(work)});
    if (is_nccl) alone.push_back({of->id, of->issued, name});
}

bool cuda_host::fails(const char* name) {
    const auto found = failing.find(name);
    if (found == failing.end()) return false;
    Failing& calls = found->second;
    if (calls.before > 0) {
        calls.before--;
        return false;
    }
    if (calls.failed == calls.count) return false;
    calls.failed++;
    return true;
}

bool cuda_host::is_inside(uint64_t address, uint64_t bytes, const char* name) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (bytes == 0) return true;
    const auto found = allocation_of(address);
    if (found != memory.end() && address + bytes <= found->first + found->second.bytes) return true;
    broken = refuse(ILLEGAL_ADDRESS, "%s: %zu bytes at %p are outside of every allocation", name, (size_t)bytes, (void*)address);
    return false;
}

using cuda_host::is_inside;

extern "C" {

// Returns how often this thread has called `name`: a function of the driver, "allocation", "launch",
// "launch:" and a kernel, "product", "random", "nccl", or "nccl beside kernels": operations of NCCL for which a stream has not waited
// when the thread launched the next kernel on it.
uint64_t cuda_host_calls(const char* name) {
    auto found = calls.find(name);
    return found == calls.end() ? 0 : found->second;
}

// Makes `count` calls of `name` by this thread fail, after `before` others. Returns how many of them have failed since
// the last call. The name is "allocation", "nccl", "cuMemMap", "cuMemSetAccess", or a function of events.
uint64_t cuda_host_fail_calls(const char* name, uint64_t before, uint64_t count) {
    return std::exchange(failing[name], {before, count, 0}).failed;
}

// Returns the most memory of the current GPU that was in use since the last call.
uint64_t cuda_host_peak() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Device& device = devices[current_device()];
    return std::exchange(device.peak_bytes, device.used_bytes);
}

CUresult cuInit(unsigned) { return SUCCESS; }
CUresult cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= device_count()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    *count = device_count();
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case MAX_THREADS: *value = 1024; break;
    case WARP_SIZE: *value = 32; break;
    case MULTIPROCESSORS: *value = 132; break;
    case MAJOR: *value = is_hopper() ? 9 : 8; break;
    case MINOR: *value = 0; break;
    case VIRTUAL_MEMORY_MANAGEMENT: *value = maps(); break;
    case MEMORY_POOLS: *value = 1; break;
    default: *value = 0;
    }
    return SUCCESS;
}

// Of the GPU with this number, in every process.
CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    for (int i = 0; i < 15; i++) uuid[i] = (unsigned char)(0xf0 - 17 * i);
    uuid[15] = (unsigned char)device;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *context = &devices[device];
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
CUresult cuCtxGetCurrent(void** context) {
    *context = current_context;
    return SUCCESS;
}
CUresult cuCtxSetCurrent(void* context) {
    current_context = (Device*)context;
    return SUCCESS;
}
CUresult cuCtxDestroy_v2(void*) { return SUCCESS; }
CUresult cuCtxSynchronize() {
    CALL;
    for_streams(current_device(), wait_for);
    return broken;
}

CUresult cuStreamCreate(void** stream, unsigned) {
    CALL_IN_CONTEXT;
    streams.push_back(new Stream);
    streams.back()->device = current_device();
    *stream = streams.back();
    return SUCCESS;
}
CUresult cuStreamDestroy_v2(void* stream) {
    CALL;
    return finish(stream_of(stream));
}
CUresult cuStreamSynchronize(void* stream) {
    CALL;
    NOT_IN_RECORDING(stream);
    return wait_for(stream_of(stream));
}
CUresult cuStreamIsCapturing(void* stream, int* status) {
    CALL;
    *status = stream_of(stream)->recording != nullptr;
    return SUCCESS;
}
CUresult cuStreamBeginCapture_v2(void* stream, int) {
    CALL_IN_CONTEXT;
    NOT_IN_RECORDING(stream);
    stream_of(stream)->recording = std::make_shared<Graph>();
    return SUCCESS;
}
// Of memory that the recording allocates, all must be freed in it. CUDA would allow more.
CUresult cuStreamEndCapture(void* stream, void** graph) {
    CALL_IN_CONTEXT;
    std::shared_ptr<Graph> recorded = std::move(stream_of(stream)->recording);
    *graph = nullptr;
    if (recorded == nullptr) return refuse(INVALID_VALUE, "the end of a recording that has not begun");
    for (CUdeviceptr pointer : recorded->allocations)
        if (!memory[pointer].is_freed) return refuse(INVALID_VALUE, "%p is allocated in a recording and stays", (void*)pointer);
    *graph = new std::shared_ptr<Graph>(std::move(recorded));
    return SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(void** instance, void* graph, unsigned long long) {
    CALL_IN_CONTEXT;
    *instance = new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)graph);
    return SUCCESS;
}
CUresult cuGraphDestroy(void* graph) {
    CALL;
    delete (std::shared_ptr<Graph>*)graph;
    return SUCCESS;
}
CUresult cuGraphExecDestroy(void* instance) { return cuGraphDestroy(instance); }
CUresult cuGraphLaunch(void* instance, void* stream) {
    CALL_IN_CONTEXT;
    NOT_IN_RECORDING(stream);
    // The memory that the graph allocates.
    if (cuda_host::fails(__func__)) return OUT_OF_MEMORY;
    Graph& graph = **(std::shared_ptr<Graph>*)instance;
    if (graph.is_trimmed) {
        size_t all = 0;
        for_allocations(graph, [&](int, size_t bytes) { all += bytes; });
        if (!take_memory(current_device(), all)) return OUT_OF_MEMORY;
        graph.is_trimmed = false;
    }
    for (const auto& work : graph.work) add(stream_of(stream), work);
    return broken;
}
// Takes the memory of graphs that no work uses.
CUresult cuDeviceGraphMemTrim(int device) {
    CALL_IN_CONTEXT;
    for (Graph* graph : graphs) {
        const auto& all = graph->allocations;
        const bool is_over = std::all_of(all.begin(), all.end(), [&](CUdeviceptr pointer) {
            const Allocation& of = memory[pointer];
            return of.device == device && of.is_freed && (of.written.name == nullptr || waited.has(of.written.stream, of.written.at));
        });
        if (graph->is_trimmed || !is_over) continue;
        graph->is_trimmed = true;
        for_allocations(*graph, [](int device, size_t bytes) { devices[device].used_bytes -= bytes; });
    }
    return SUCCESS;
}
CUresult cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    CALL_IN_CONTEXT;
    if (cuda_host::fails(__func__)) return OUT_OF_MEMORY;
    const Event& event = *(Event*)handle;
    if (event.stream == nullptr || event.stream == stream_of(stream)) return broken;
    stream_of(stream)->clock.merge(event.clock);
    return add(stream_of(stream), {__func__, {}, false, [from = event.stream, at = event.at] { run_until(from, at); }});
}

CUresult cuEventCreate(void** event, unsigned) {
    CALL;
    if (cuda_host::fails(__func__)) return OUT_OF_MEMORY;
    *event = new Event;
    return SUCCESS;
}
CUresult cuEventDestroy_v2(void* event) {
    CALL;
    delete (Event*)event;
    return SUCCESS;
}
CUresult cuEventRecord(void* event, void* stream) {
    CALL_IN_CONTEXT;
    if (cuda_host::fails(__func__)) return OUT_OF_MEMORY;
    Stream* of = stream_of(stream);
    *(Event*)event = {of, of->issued, of->clock};
    return broken;
}

CUresult cuEventSynchronize(void* handle) {
    CALL;
    const Event& event = *(Event*)handle;
    waited_by_thread.merge(event.clock);
    if (event.stream != nullptr) run_until(event.stream, event.at);
    return broken;
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    CALL_IN_CONTEXT;
    *total = total_memory;
    *free = total_memory - devices[current_device()].used_bytes;
    return SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
    CALL_IN_CONTEXT;
    return allocate(pointer, bytes, current_device());
}
// 0 bytes give a null pointer, and no error as from cuMemAlloc.
CUresult cuMemAllocAsync(CUdeviceptr* pointer, size_t bytes, void* handle) {
    CALL_IN_CONTEXT;
    *pointer = 0;
    if (bytes == 0) return SUCCESS;
    Stream* stream = stream_of(handle);
    const CUresult result = allocate(pointer, bytes, stream->device);
    if (result != SUCCESS) return result;
    memory[*pointer].is_pooled = true;
    if (stream->recording != nullptr) stream->recording->allocations.push_back(*pointer);
    const bool is_new = stream->recording == nullptr;
    return add(stream, {__func__, {{*pointer, true}}, false, [start = *pointer, bytes, is_new] {
        if (!is_new) memset((void*)start, 0xff, bytes);
    }});
}
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    CALL;
    if (pointer == 0) return SUCCESS;
    for_streams(current_device(), wait_for);
    const auto found = memory.find(pointer);
    if (found != memory.end() && found->second.is_opened)
        return refuse(INVALID_VALUE, "free of %p, which belongs to another process", (void*)pointer);
    if (found != memory.end() && found->second.file >= 0 && flock(found->second.file, LOCK_EX | LOCK_NB) != 0)
        return refuse(INVALID_VALUE, "free of %p, which another process has open", (void*)pointer);
    if (CUresult result = mark_freed(pointer)) return result;
    release(pointer);
    return broken;
}
// Gives other processes access to an allocation, as long as it exists.
CUresult cuIpcGetMemHandle(IpcHandle* handle, CUdeviceptr pointer) {
    CALL_IN_CONTEXT;
    const auto found = allocation_of(pointer);
    if (found == memory.end() || found->second.is_freed || found->second.is_opened || found->second.is_mapped)
        return refuse(INVALID_VALUE, "a handle of %p, which is not an allocation of this process", (void*)pointer);
    Allocation& allocation = found->second;
    if (allocation.is_pooled) return refuse(INVALID_VALUE, "a handle of %p, which is memory of a pool", (void*)pointer);
    const size_t whole = pages(rounded(allocation.bytes)) * page;
    char* start = (char*)found->first + rounded(allocation.bytes) - whole;
    if (allocation.file < 0) {
        for_streams(allocation.device, finish);
        const int file = memfd_create("cuda_host", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, (off_t)whole) != 0 || pwrite(file, start, whole, 0) != (ssize_t)whole) {
            perror("cuda_host: a file for an allocation");
            if (file >= 0) close(file);
            return OUT_OF_MEMORY;
        }
        map_again(start, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file);
        allocation.file = file;
    }
    *handle = {};
    handle->process = getpid();
    handle->file = allocation.file;
    handle->device = allocation.device;
    handle->bytes = allocation.bytes;
    handle->inode = inode_of(allocation.file);
    return SUCCESS;
}
// The flag CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is 1, and the only one.
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, IpcHandle handle, unsigned flags) {
    CALL_IN_CONTEXT;
    if (flags != 1) return refuse(INVALID_VALUE, "cuIpcOpenMemHandle with the flags %u, must be 1", flags);
    if (handle.process == getpid()) return refuse(INVALID_CONTEXT, "a handle that its own process opens");
    if (handle.device != current_device())
        return refuse(INVALID_CONTEXT, "a handle of GPU %d, opened on GPU %d", handle.device, current_device());
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0 || inode_of(file) != handle.inode || flock(file, LOCK_SH | LOCK_NB) != 0) {
        if (file >= 0) close(file);
        return refuse(INVALID_HANDLE, "a handle of memory that does not exist: %s", path.c_str());
    }
    void* end = cuda_host_buffer(rounded(handle.bytes));
    const size_t whole = pages(rounded(handle.bytes)) * page;
    map_again((char*)end + rounded(handle.bytes) - whole, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file);
    *pointer = (CUdeviceptr)end;
    Allocation allocation = {handle.bytes, current_device()};
    allocation.file = file;
    allocation.is_opened = true;
    memory[*pointer] = allocation;
    return SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    CALL_IN_CONTEXT;
    for_streams(current_device(), wait_for);
    const auto found = memory.find(pointer);
    if (found == memory.end() || !found->second.is_opened)
        return refuse(INVALID_VALUE, "the close of %p, which no handle has opened", (void*)pointer);
    cuda_host_free((void*)pointer, rounded(found->second.bytes));
    close(found->second.file);
    memory.erase(found);
    return broken;
}
CUresult cuMemFreeAsync(CUdeviceptr pointer, void* handle) {
    CALL;
    if (pointer == 0) return SUCCESS;
    Stream* stream = stream_of(handle);
    const Graph* graph = stream->recording.get();
    if (graph == nullptr) {
        if (CUresult result = mark_freed(pointer)) return result;
        return add(stream, {__func__, {{pointer, true}}, false, [pointer] { release(pointer); }});
    }
    const auto& own = graph->allocations;
    if (std::find(own.begin(), own.end(), pointer) == own.end())
        return refuse(INVALID_VALUE, "a recorded free of %p, which the recording does not allocate", (void*)pointer);
    if (CUresult result = mark_freed(pointer)) return result;
    const size_t bytes = memory[pointer].bytes;
    return add(stream, {__func__, {{pointer, true}}, false, [pointer, bytes] { memset((void*)pointer, 0xff, bytes); }});
}
// Refuses a call that the GPU does not support.
#define CALL_OF_MAPS \
    CALL_IN_CONTEXT; \
    if (!maps()) return refuse(NOT_SUPPORTED, "%s on a GPU without virtual memory management", __func__)

// That of NVIDIA's GPUs is 2 MiB. A small one lets small tensors grow.
CUresult cuMemGetAllocationGranularity(size_t* granularity, const Properties* of, int) {
    CALL_OF_MAPS;
    if (of->type != 1 || !is_device(of->location)) return refuse(INVALID_VALUE, "the granularity of memory that is not of a GPU");
    *granularity = page;
    return SUCCESS;
}
// An inaccessible page follows the range.
CUresult cuMemAddressReserve(CUdeviceptr* start, size_t bytes, size_t alignment, CUdeviceptr address, unsigned long long flags) {
    CALL_OF_MAPS;
    if (bytes == 0 || bytes % page != 0 || alignment > page || address != 0 || flags != 0)
        return refuse(INVALID_VALUE, "a range of %zu bytes, must be a multiple of %zu, without alignment, address and flags", bytes, page);
    void* range = mmap(nullptr, bytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return OUT_OF_MEMORY;
    *start = (CUdeviceptr)range;
    ranges[*start] = {bytes};
    return SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    CALL_OF_MAPS;
    const auto found = ranges.find(start);
    if (found == ranges.end() || found->second.bytes != bytes)
        return refuse(INVALID_VALUE, "free of %zu bytes at %p, which are not a range", bytes, (void*)start);
    if (found->second.mapped > 0) return refuse(INVALID_VALUE, "free of the range at %p, in which memory is mapped", (void*)start);
    ranges.erase(found);
    bury((void*)start, bytes + page);
    return SUCCESS;
}
// CU_MEM_ALLOCATION_TYPE_PINNED is 1.
CUresult cuMemCreate(uint64_t* handle, size_t bytes, const Properties* of, unsigned long long flags) {
    CALL_OF_MAPS;
    if (bytes == 0 || bytes % page != 0 || of->type != 1 || of->handle_types != 0 || !is_device(of->location) || flags != 0)
        return refuse(INVALID_VALUE, "memory of %zu bytes, must be a multiple of %zu, of a GPU", bytes, page);
    if (!take_memory(of->location.id, bytes)) return OUT_OF_MEMORY;
    *handle = ++handles;
    physical[*handle] = {bytes, of->location.id};
    return SUCCESS;
}
CUresult cuMemRelease(uint64_t handle) {
    CALL_OF_MAPS;
    const auto found = physical.find(handle);
    if (found == physical.end() || !found->second.is_held)
        return refuse(INVALID_VALUE, "release of %llu, which is not a handle", (unsigned long long)handle);
    found->second.is_held = false;
    release_physical(handle);
    return SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    CALL_OF_MAPS;
    if (cuda_host::fails(__func__)) return INVALID_VALUE;
    const auto found = range_of(at);
    const auto of = physical.find(handle);
    if (of == physical.end() || !of->second.is_held || of->second.is_mapped || of->second.bytes != bytes || offset != 0 || flags != 0)
        return refuse(INVALID_VALUE, "a mapping of %zu bytes, must be all of a handle that is not mapped", bytes);
    if (found == ranges.end() || at != found->first + found->second.mapped || found->second.mapped + bytes > found->second.bytes)
        return refuse(INVALID_VALUE, "a mapping of %zu bytes at %p, must follow the others in a range", bytes, (void*)at);
    Range& range = found->second;
    range.mappings.push_back({bytes, handle, false});
    range.mapped += bytes;
    of->second.is_mapped = true;
    return SUCCESS;
}
// CU_MEM_ACCESS_FLAGS_PROT_READWRITE is 3.
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const AccessOf* access, size_t count) {
    CALL_OF_MAPS;
    if (cuda_host::fails(__func__)) return INVALID_VALUE;
    const auto found = range_of(at);
    if (found != ranges.end() && count == 1 && access->flags == 3) {
        CUdeviceptr start = found->first;
        for (Mapping& mapping : found->second.mappings) {
            const Physical& of = physical.at(mapping.handle);
            if (start == at && mapping.bytes == bytes && access->location.type == 1 && access->location.id == of.device) {
                protect((void*)at, bytes, PROT_READ | PROT_WRITE);
                if (!mapping.is_accessible) memset((void*)at, 0xff, bytes);
                mapping.is_accessible = true;
                set_allocation(found->first, found->second);
                return SUCCESS;
            }
            start += mapping.bytes;
        }
    }
    return refuse(INVALID_VALUE, "access to %zu bytes at %p, must be a mapping, for its GPU to read and write", bytes, (void*)at);
}
// The driver does not wait for work.
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    CALL_OF_MAPS;
    const auto found = range_of(at);
    if (found == ranges.end() || found->second.mappings.empty() || found->second.mappings.back().bytes != bytes ||
        at != found->first + found->second.mapped - bytes)
        return refuse(INVALID_VALUE, "unmap of %zu bytes at %p, which are not the last mapping of a range", bytes, (void*)at);
    const auto of = memory.find(found->first);
    if (of != memory.end()) {
        std::vector<Place> uses = of->second.reads;
        uses.push_back(of->second.written);
        for (const Place& use : uses) {
            if (use.name == nullptr || waited.has(use.stream, use.at) || waited_by_thread.has(use.stream, use.at)) continue;
            return broken = refuse(ILLEGAL_ADDRESS, "unmap of %p, which %s on stream %zu uses: the host has not waited for it", (void*)at,
                                   use.name, use.stream);
        }
    }
    Range& range = found->second;
    const uint64_t handle = range.mappings.back().handle;
    range.mappings.pop_back();
    range.mapped -= bytes;
    map_again((void*)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    set_allocation(found->first, range);
    physical.at(handle).is_mapped = false;
    release_physical(handle);
    return SUCCESS;
}
CUresult cuDeviceGetDefaultMemPool(void** pool, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *pool = &devices[device];
    return SUCCESS;
}
// CU_MEMPOOL_ATTR_RELEASE_THRESHOLD is 4.
CUresult cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    if (attribute != 4) return INVALID_VALUE;
    memcpy(&((Device*)pool)->pool_threshold, value, sizeof(uint64_t));
    return SUCCESS;
}
CUresult cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
    if (attribute != 4) return INVALID_VALUE;
    memcpy(value, &((Device*)pool)->pool_threshold, sizeof(uint64_t));
    return SUCCESS;
}

// The pool keeps no memory, and takes none back.
CUresult cuMemPoolTrimTo(void*, size_t) {
    CALL_IN_CONTEXT;
    return SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void* stream) {
    CALL_IN_CONTEXT;
    return add(stream_of(stream), {__func__, {{to, true}}, false, [=] {
        if (is_inside(to, bytes, "cuMemsetD8Async")) memset((void*)to, value, bytes);
    }});
}
CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
    CALL_IN_CONTEXT;
    if (bytes == 0) return refuse(INVALID_VALUE, "0 bytes of page-locked memory");
    if (allocation_fails()) return OUT_OF_MEMORY;
    *pointer = cuda_host_buffer(rounded(bytes));
    memset(*pointer, 0xff, bytes);
    pinned[(const char*)*pointer] = bytes;
    return SUCCESS;
}
CUresult cuMemFreeHost(void* pointer) {
    CALL;
    const auto found = pinned.find((const char*)pointer);
    if (found == pinned.end()) return refuse(INVALID_VALUE, "free of %p, which is no page-locked memory", pointer);
    cuda_host_free(pointer, rounded(found->second));
    pinned.erase(found);
    return SUCCESS;
}
// The driver copies pageable host memory before the call returns, and page-locked memory when the stream comes to it.
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, void* stream) {
    CALL_IN_CONTEXT;
    // CUDA would record the address on the host.
    NOT_IN_RECORDING(stream);
    if (is_pinned(from)) {
        return add(stream_of(stream), {__func__, {{to, true}}, true, [=] {
            if (is_inside(to, bytes, "cuMemcpyHtoDAsync")) memcpy((void*)to, from, bytes);
        }});
    }
    auto copy = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    return add(stream_of(stream), {__func__, {{to, true}}, true, [=] {
        if (is_inside(to, bytes, "cuMemcpyHtoDAsync")) memcpy((void*)to, copy->data(), bytes);
    }});
}
// The call waits unless the host memory is page-locked.
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void* stream) {
    CALL_IN_CONTEXT;
    NOT_IN_RECORDING(stream);
    const CUresult result = add(stream_of(stream), {__func__, {{from, false}}, true, [=] {
        if (is_inside(from, bytes, "cuMemcpyDtoHAsync")) memcpy(to, (void*)from, bytes);
    }});
    return is_pinned(to) ? result : wait_for(stream_of(stream));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
    CALL_IN_CONTEXT;
    return add(stream_of(stream), {__func__, {{from, false}, {to, true}}, true, [=] {
        if (is_inside(from, bytes, "cuMemcpyDtoDAsync, source") && is_inside(to, bytes, "cuMemcpyDtoDAsync, target"))
            memmove((void*)to, (void*)from, bytes);
    }});
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, void*, CUdeviceptr from, void*, size_t bytes, void* stream) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

// Loads the shared library that an image of kernels/host/bin/nvcc names, or the second one.
CUresult cuModuleLoadData(void** module, const void* image) {
    CALL_IN_CONTEXT;
    char threads[16], path[4096];
    const char* second = strstr((const char*)image + 1, "CUDA-ON-HOST");
    const bool is_jit = variable("CUDA_FORCE_PTX_JIT") == 1;
    if (is_hopper() && !is_jit && second != nullptr) image = second;
    if (sscanf((const char*)image, "CUDA-ON-HOST %15s %4095[^\n]", threads, path) != 2)
        return refuse(INVALID_IMAGE, "a module that is not of kernels/host/bin/nvcc");
    if (strcmp(threads, "none") == 0) return refuse(NOT_SUPPORTED, "the kernels of %s are not emulated", path);
    const std::string with_hooks = std::string(path, strlen(path) - strlen(".so")) + ".races.so";
    const bool has_hooks = finds_races() && access(with_hooks.c_str(), R_OK) == 0;
    void* library = dlopen(has_hooks ? with_hooks.c_str() : path, RTLD_NOW | RTLD_LOCAL);
    const Kernel* kernel = library == nullptr ? nullptr : (const Kernel*)dlsym(library, "cuda_host_kernels");
    if (kernel == nullptr) return refuse(INVALID_IMAGE, "%s", dlerror());
    auto* loaded = new Module;
    for (; kernel->name != nullptr; kernel++)
        loaded->functions[kernel->name] = {kernel, current_device(), strcmp(threads, "loop") == 0};
    *module = loaded;
    return SUCCESS;
}
CUresult cuModuleLoad(void**, const char*) { return NOT_SUPPORTED; }
CUresult cuModuleUnload(void*) { return SUCCESS; }
CUresult cuModuleGetFunction(void** function, void* handle, const char* name) {
    CALL;
    auto& functions = ((Module*)handle)->functions;
    auto found = functions.find(name);
    if (found == functions.end()) return refuse(NOT_FOUND, "the module has no kernel %s", name);
    *function = &found->second;
    return SUCCESS;
}
// CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK is 0.
CUresult cuFuncGetAttribute(int* value, int attribute, void* handle) {
    CALL;
    if (attribute != 0) return INVALID_VALUE;
    *value = (int)((Function*)handle)->kernel->max_threads;
    return SUCCESS;
}
// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES is 8.
CUresult cuFuncSetAttribute(void* handle, int attribute, int value) {
    CALL;
    if (attribute != 8) return SUCCESS;
    if (value < 0 || (unsigned)value > shared_most)
        return refuse(INVALID_VALUE, "%d bytes of shared memory, must be at most %u", value, shared_most);
    ((Function*)handle)->shared_bytes = (unsigned)value;
    return SUCCESS;
}

CUresult cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, void* handle_of_stream, void** arguments, void**) {
    CALL_IN_CONTEXT;
    Stream* stream = stream_of(handle_of_stream);
    const Function& function = *(Function*)handle;
    const Kernel* kernel = function.kernel;
    count_beside(stream);
    calls["launch"]++;
    calls[std::string("launch:") + kernel->name]++;
    const uint64_t threads = (uint64_t)block_x * block_y * block_z;
    const char* wrong = grid_x == 0 || grid_y == 0 || grid_z == 0        ? "an empty grid"
                        : threads == 0                                   ? "an empty block"
                        : grid_x > INT32_MAX                             ? "a grid of more than 2^31 - 1 blocks in x"
                        : grid_y > 65535 || grid_z > 65535               ? "a grid of more than 65,535 blocks in y or z"
                        : threads > kernel->max_threads || block_z > 64  ? "more threads than the kernel takes"
                        : shared_bytes > function.shared_bytes           ? "more shared memory than the kernel may use"
                                                                         : nullptr;
    if (wrong != nullptr)
        return refuse(INVALID_VALUE, "%s: %s: grid (%u, %u, %u), block (%u, %u, %u), %u bytes of shared memory", kernel->name,
                      wrong, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes);
    if (function.device != stream->device || current_device() != stream->device)
        return refuse(INVALID_HANDLE, "%s: a kernel of GPU %d, on a stream of GPU %d, with the context of GPU %d", kernel->name,
                      function.device, stream->device, current_device());
    auto launch = std::make_shared<Launch>(kernel, arguments);
    return add(stream, {kernel->name, launch->uses(), false, [=, is_loop = function.is_loop] {
        static const unsigned order = variable("CUDA_ON_HOST_ORDER");
        const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
        auto thread = [](void* launch) { ((Launch*)launch)->kernel->call(((Launch*)launch)->pointers.data()); };
        cuda_host_kernel = kernel->name;
        const char* error = cuda_host_launch(grid, block, shared_bytes, order, is_loop, finds_races(), thread, launch.get());
        if (error == nullptr) return;
        broken = refuse(ASSERT, "%s: %s", kernel->name, error);
        const auto raced = finds_races() ? allocation_of(cuda_host_race) : memory.end();
        if (raced != memory.end())
            refuse(ASSERT, "the race is at byte %zu of the %zu bytes at %p", (size_t)(cuda_host_race - raced->first),
                   raced->second.bytes, (void*)raced->first);
    }});
}

CUresult cuGetErrorString(CUresult error, const char** name) {
    switch (error) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case ASSERT: *name = "CUDA_ERROR_ASSERT"; break;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case CAPTURE_UNSUPPORTED: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
    case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: *name = "CUDA_ERROR_UNKNOWN";
    }
    return SUCCESS;
}

}  // extern "C"
