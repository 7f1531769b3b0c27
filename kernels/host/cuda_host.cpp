// Runs a launch: the blocks in sequence, and the threads of a block as fibers that switch at
// barriers and warp operations.

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define CUDA_HOST_RUNTIME
#include "include/cuda_host.h"
#include "races.h"

thread_local uint3 threadIdx;
thread_local uint3 blockIdx;
thread_local dim3 blockDim;
thread_local dim3 gridDim;

// The name of the running kernel, for messages.
extern "C" thread_local const char* cuda_host_kernel;
thread_local const char* cuda_host_kernel = "a kernel";

namespace {

namespace races = cuda_host::races;

constexpr size_t most_threads = 1024;
constexpr size_t stack_bytes = 128 << 10;
// The stacks of a block start at different lines of the cache. At the same line of each page, they would displace each other.
constexpr size_t stack_shift = 320, longest_shift = 60 << 10;

enum class State { Ready, AtBlockBarrier, AtWarpOperation, Done };

// A place to jump to, of the compiler's own functions: setjmp of the C library takes several times as long.
using Jump = void* [5];

// Runs one thread of a block after the other. A switch to it reads its first line of the cache.
struct alignas(64) Fiber {
    Jump here;
    State state;
    unsigned mask;
    uint3 index;
    uint8_t lane;
    bool started = false;  // it has a frame on its stack
    bool is_barrier;
    const char* operation;  // the operation of the waiting fiber
    uint64_t brought;
    cuda_host::Collective collective;  // null for an exchange of values
    const cuda_host::Lanes* received;  // values of the lanes in the last exchange
};

struct Launch {
    Fiber* fibers = nullptr;
    size_t threads = 0;
    Fiber* running = nullptr;
    // The running warp, the order of its lanes, and how many of these had their turn.
    Fiber* warp = nullptr;
    size_t lanes = 0, turns = 0;
    std::array<uint8_t, 32> lane_order;
    bool finds_races = false;
    Jump scheduler;
    char* shared = nullptr;
    size_t shared_bytes = 0;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    std::string error;
};

thread_local Launch* launch = nullptr;
thread_local unsigned running_lane = 0;

// The fibers of the largest block so far, which serve every launch of a thread, and their stacks.
struct Fibers {
    std::unique_ptr<Fiber[]> all;
    // The values of an exchange, at the place of its first lane.
    std::unique_ptr<cuda_host::Lanes[]> values;
    size_t count = 0;
    char* stacks = nullptr;

    Fiber* take(size_t wanted) {
        if (stacks == nullptr) {
            stacks = (char*)mmap(nullptr, most_threads * stack_bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (stacks == MAP_FAILED) {
                perror("cuda_host: the stacks");
                abort();
            }
        }
        if (wanted > count) {
            all.reset(new Fiber[wanted]);
            values.reset(new cuda_host::Lanes[wanted]);
            count = wanted;
        }
        return all.get();
    }

    ~Fibers() {
        if (stacks != nullptr) munmap(stacks, most_threads * stack_bytes);
    }
};

thread_local Fibers fibers;

[[noreturn]] void start(Fiber* fiber);

// Continues with the next lane of the running warp that is ready, or else with the scheduler.
[[noreturn]] __attribute__((noinline)) void yield() {
    while (launch->turns < launch->lane_order.size()) {
        const size_t lane = launch->lane_order[launch->turns++];
        Fiber* fiber = launch->warp + lane;
        if (lane >= launch->lanes || fiber->state != State::Ready) continue;
        launch->running = fiber;
        threadIdx = fiber->index;
        running_lane = fiber->lane;
        if (launch->finds_races) races::run_thread((size_t)(fiber - launch->fibers));
        if (!fiber->started) start(fiber);
        __builtin_longjmp(fiber->here, 1);
    }
    __builtin_longjmp(launch->scheduler, 1);
}

// The first function on the stack of a fiber. It runs a thread each time that the fiber is resumed after the one before.
__attribute__((noinline)) void run_fiber() {
    for (;;) {
        Fiber* self = launch->running;
        launch->body(launch->argument);
        self->state = State::Done;
        if (__builtin_setjmp(self->here) == 0) yield();
    }
}

// A context starts a fiber; later switches are jumps. Switching contexts would take a system call
// each time.
[[noreturn]] __attribute__((noinline)) void start(Fiber* fiber) {
    ucontext_t context;
    getcontext(&context);
    const size_t number = (size_t)(fiber - launch->fibers);
    context.uc_stack.ss_sp = fibers.stacks + number * stack_bytes;
    context.uc_stack.ss_size = stack_bytes - number * stack_shift % longest_shift;
    context.uc_link = nullptr;
    makecontext(&context, run_fiber, 0);
    fiber->started = true;
    setcontext(&context);
    abort();
}

// Runs each lane of a warp that is ready until it waits.
__attribute__((noinline)) void run_lanes(Fiber* warp, size_t lanes) {
    launch->warp = warp;
    launch->lanes = lanes;
    launch->turns = 0;
    if (__builtin_setjmp(launch->scheduler) == 0) yield();
}

// Resumes a warp whose lanes have all arrived. Returns whether there was one.
bool end_warp_operation(Fiber* warp, size_t lanes) {
    bool ended = false;
    for (size_t i = 0; i < lanes; i++) {
        if (warp[i].state != State::AtWarpOperation) continue;
        unsigned mask = warp[i].mask;
        bool whole = true;
        for (size_t j = 0; j < 32 && whole; j++) {
            if (!(mask >> j & 1)) continue;
            whole = j < lanes && warp[j].state == State::AtWarpOperation && warp[j].mask == mask
                    && (warp[j].operation == warp[i].operation || strcmp(warp[j].operation, warp[i].operation) == 0);
        }
        if (!whole) continue;
        // All lanes read these before the next operation of one of them ends.
        cuda_host::Lanes& values = fibers.values[(size_t)(warp - launch->fibers) + i];
        for (size_t from = 0; from < lanes; from++) values[from] = warp[from].brought;
        if (warp[i].collective != nullptr) warp[i].collective(values);
        if (warp[i].is_barrier) races::meet_at_warp_barrier((size_t)(warp - launch->fibers) / 32, mask);
        for (size_t to = 0; to < lanes; to++) {
            if (!(mask >> to & 1)) continue;
            warp[to].received = &values;
            warp[to].state = State::Ready;
        }
        ended = true;
    }
    return ended;
}

// Resumes the block if all threads are at its barrier. Returns whether they are.
bool end_block_barrier() {
    for (size_t i = 0; i < launch->threads; i++)
        if (launch->fibers[i].state != State::AtBlockBarrier) return false;
    for (size_t i = 0; i < launch->threads; i++) launch->fibers[i].state = State::Ready;
    races::meet_at_block_barrier();
    return true;
}

std::string where(const Fiber& fiber) {
    char text[160];
    const char* what = fiber.state == State::Done ? "has returned" : fiber.operation;
    snprintf(text, sizeof text, "thread (%u, %u, %u) %s%s", fiber.index.x, fiber.index.y, fiber.index.z,
             fiber.state == State::Done ? "" : "waits at ", what);
    return text;
}

// Reports the threads that cannot meet.
std::string deadlock() {
    const Fiber *first = launch->fibers, *end = first + launch->threads;
    const Fiber* waiting = std::find_if(first, end, [](const Fiber& fiber) { return fiber.state != State::Done; });
    for (const Fiber* at = first; at != end; at++) {
        const Fiber& fiber = *at;
        if (fiber.state != waiting->state || strcmp(fiber.operation, waiting->operation) != 0
            || fiber.mask != waiting->mask)
            return where(*waiting) + ", but " + where(fiber);
    }
    return where(*waiting) + " for lanes that the block does not have";
}

void run_block(std::minstd_rand& random, bool reverse, bool shuffle) {
    Fiber* fibers = launch->fibers;
    const size_t threads = launch->threads;
    // NaN in every float type.
    if (launch->shared_bytes > 0) memset(launch->shared, 0xff, launch->shared_bytes);
    for (size_t i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.index = {(unsigned)(i % blockDim.x), (unsigned)(i / blockDim.x % blockDim.y),
                       (unsigned)(i / blockDim.x / blockDim.y)};
        fiber.lane = (uint8_t)(i % 32);
        fiber.state = State::Ready;
        fiber.operation = "";
        fiber.mask = 0;
    }
    // A warp runs until it blocks before the next one starts: exchange between warps needs a
    // barrier.
    const size_t warps = (threads + 31) / 32;
    std::vector<size_t> warp_order(warps);
    std::array<uint8_t, 32>& lane_order = launch->lane_order;
    for (size_t i = 0; i < warps; i++) warp_order[i] = reverse ? warps - 1 - i : i;
    for (size_t i = 0; i < 32; i++) lane_order[i] = (uint8_t)(reverse ? 31 - i : i);
    for (;;) {
        if (shuffle) std::shuffle(warp_order.begin(), warp_order.end(), random);
        for (size_t warp : warp_order) {
            Fiber* first = &fibers[32 * warp];
            const size_t lanes = std::min<size_t>(32, threads - 32 * warp);
            do {
                if (shuffle) std::shuffle(lane_order.begin(), lane_order.end(), random);
                run_lanes(first, lanes);
                if (!launch->error.empty()) return;
            } while (end_warp_operation(first, lanes));
        }
        bool done = true;
        for (size_t i = 0; i < threads; i++) done = done && fibers[i].state == State::Done;
        if (done) return;
        if (!end_block_barrier()) {
            launch->error = deadlock();
            return;
        }
    }
}

// Runs the threads of a block one after the other.
void run_loop(bool reverse) {
    if (__builtin_setjmp(launch->scheduler) != 0) return;
    unsigned thread = reverse ? (unsigned)launch->threads - 1 : 0;
    for (unsigned i = 0; i < blockDim.z; i++) {
        const unsigned z = reverse ? blockDim.z - 1 - i : i;
        for (unsigned j = 0; j < blockDim.y; j++) {
            const unsigned y = reverse ? blockDim.y - 1 - j : j;
            for (unsigned k = 0; k < blockDim.x; k++) {
                threadIdx = {reverse ? blockDim.x - 1 - k : k, y, z};
                running_lane = thread % 32;
                if (launch->finds_races) races::run_thread(thread);
                launch->body(launch->argument);
                thread += reverse ? -1u : 1u;
            }
        }
    }
}

// Reports a load or store outside of every buffer, which ends the process.
void on_segv(int) {
    char text[200];
    int length = snprintf(text, sizeof text,
                          "cuda_host: %s: memory outside of every buffer, block (%u, %u, %u), thread (%u, %u, %u)\n",
                          cuda_host_kernel, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    if (launch != nullptr && write(2, text, (size_t)length) < 0) _exit(1);
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
}

}  // namespace

namespace cuda_host {

#ifdef __x86_64__
__attribute__((target_clones("avx2", "default")))
#endif
void add_product(float* c, const float* a, const float* b, int rows, int columns, int depth) {
    // Sums that stay in registers.
    constexpr int width = 8;
    if (columns % width != 0) fail("a product of %d columns, which must be a multiple of %d", columns, width);
    for (int row = 0; row < rows; row++) {
        for (int first = 0; first < columns; first += width) {
            float* to = c + row * columns + first;
            double sums[width];
            for (int j = 0; j < width; j++) sums[j] = to[j];
            for (int k = 0; k < depth; k++)
                for (int j = 0; j < width; j++) sums[j] += (double)a[row * depth + k] * (double)b[k * columns + first + j];
            for (int j = 0; j < width; j++) to[j] = (float)sums[j];
        }
    }
}

void* dynamic_shared() { return launch->shared; }

unsigned lane() { return running_lane; }

void block_barrier() {
    Fiber* self = launch->running;
    if (self == nullptr) fail("__syncthreads in a loop of threads");
    self->operation = "__syncthreads";
    self->state = State::AtBlockBarrier;
    if (__builtin_setjmp(self->here) == 0) yield();
}

// Waits at an operation of the lanes in `mask`, and returns the values of all lanes.
static const Lanes& meet(const char* name, unsigned mask, uint64_t brought, bool is_barrier, Collective collective) {
    Fiber* self = launch->running;
    if (self == nullptr) fail("%s in a loop of threads", name);
    if (!(mask >> running_lane & 1)) fail("%s by a lane that is not in its mask %08x", name, mask);
    self->mask = mask;
    self->brought = brought;
    self->is_barrier = is_barrier;
    self->collective = collective;
    self->operation = name;
    self->state = State::AtWarpOperation;
    if (__builtin_setjmp(self->here) == 0) yield();
    return *launch->running->received;
}

const Lanes& warp_exchange(const char* name, unsigned mask, uint64_t value) { return meet(name, mask, value, false, nullptr); }

void warp_barrier(unsigned mask) { meet("__syncwarp", mask, 0, true, nullptr); }

void warp_collective(const char* name, void* argument, Collective collective) {
    meet(name, 0xffffffffu, (uint64_t)(uintptr_t)argument, false, collective);
}

void fail(const char* format, ...) {
    char text[1000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    launch->error = text;
    __builtin_longjmp(launch->scheduler, 1);
}

}  // namespace cuda_host

// Handlers of -fsanitize=undefined, with which the kernels are compiled. The argument of each
// starts with the source location.
struct Place {
    const char* file;
    uint32_t line, column;
};
#define UNDEFINED(name, what)                                                                     \
    extern "C" [[noreturn]] void __ubsan_handle_##name##_abort(Place* place, ...) {               \
        cuda_host::fail("%s at %s:%u:%u", what, place->file, place->line, place->column);         \
    }
UNDEFINED(type_mismatch_v1, "misaligned or null access")
UNDEFINED(pointer_overflow, "pointer overflow")
UNDEFINED(out_of_bounds, "index out of bounds")
UNDEFINED(add_overflow, "signed overflow")
UNDEFINED(sub_overflow, "signed overflow")
UNDEFINED(mul_overflow, "signed overflow")
UNDEFINED(negate_overflow, "signed overflow")
UNDEFINED(divrem_overflow, "division by zero")
UNDEFINED(shift_out_of_bounds, "shift out of bounds")
UNDEFINED(load_invalid_value, "invalid value")
UNDEFINED(float_cast_overflow, "float that does not fit into an integer")
UNDEFINED(vla_bound_not_positive, "array without elements")
UNDEFINED(nonnull_arg, "null argument")
extern "C" [[noreturn]] void __ubsan_handle_builtin_unreachable(Place* place) {
    cuda_host::fail("unreachable code at %s:%u:%u", place->file, place->line, place->column);
}
extern "C" [[noreturn]] void __ubsan_handle_missing_return(Place* place) {
    cuda_host::fail("missing return at %s:%u:%u", place->file, place->line, place->column);
}

// Allocates a buffer of `bytes` that ends at an inaccessible page.
extern "C" void* cuda_host_buffer(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    char* start = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + whole, page, PROT_NONE) != 0) {
        perror("cuda_host: a buffer");
        abort();
    }
    return start + whole - bytes;
}

extern "C" void cuda_host_free(void* buffer, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    munmap((char*)buffer + bytes - whole, whole + page);
}

namespace {

// The shared memory of the last launch of a thread, for the next one of that size.
struct SharedMemory {
    char* buffer = nullptr;
    size_t bytes = 0;

    char* take(size_t wanted) {
        if (wanted != bytes) {
            release();
            buffer = wanted > 0 ? (char*)cuda_host_buffer(wanted) : nullptr;
            bytes = wanted;
        }
        return buffer;
    }

    void release() {
        if (bytes > 0) cuda_host_free(buffer, bytes);
    }

    ~SharedMemory() { release(); }
};

thread_local SharedMemory shared_memory;

}  // namespace

// Calls body(argument) once for each thread of the grid. `order` 0 runs the warps of a block and
// their lanes in ascending order, 1 in descending order, and any other number in a random order
// with that seed. A result that differs between orders shows a missing barrier. Returns null or an
// error message, valid until the next launch of this thread.
//
// With `is_loop` the threads are calls in a loop. That is faster, but a kernel with barriers or
// warp operations fails.
//
// With `finds_races` a race is an error, if the kernel has the hooks of races.h.
extern "C" const char* cuda_host_launch(const unsigned grid[3], const unsigned block[3], size_t shared_bytes, unsigned order,
                                        bool is_loop, bool finds_races, void (*body)(void*), void* argument) {
    static thread_local std::string error;
    static const bool handled = [] {
        struct sigaction action = {};
        action.sa_handler = on_segv;
        action.sa_flags = SA_NODEFER;
        return sigaction(SIGSEGV, &action, nullptr) == 0;
    }();
    (void)handled;
    size_t threads = (size_t)block[0] * block[1] * block[2];
    error.clear();
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || threads == 0) error = "a launch without threads";
    if (grid[1] > 65535 || grid[2] > 65535 || grid[0] > 0x7fffffffu) error = "a grid larger than a GPU takes";
    if (threads > most_threads || block[2] > 64) error = "a block larger than a GPU takes";
    if (shared_bytes > 99 << 10) error = "more than 99 KiB of shared memory, which some GPUs do not have";
    if (!error.empty()) return error.c_str();

    Launch current;
    current.threads = threads;
    if (!is_loop) current.fibers = fibers.take(threads);
    // Multiples of 16 bytes, so that the start is aligned.
    current.shared_bytes = (shared_bytes + 15) / 16 * 16;
    current.shared = shared_memory.take(current.shared_bytes);
    current.body = body;
    current.argument = argument;
    current.finds_races = finds_races;
    launch = &current;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    if (finds_races)
        races::begin_launch({(uintptr_t)fibers.stacks, most_threads * stack_bytes},
                            {(uintptr_t)current.shared, current.shared_bytes});
    std::minstd_rand random(order);
    size_t blocks = (size_t)grid[0] * grid[1] * grid[2];
    for (size_t i = 0; i < blocks && current.error.empty(); i++) {
        size_t at = order == 1 ? blocks - 1 - i : i;
        blockIdx = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]), (unsigned)(at / grid[0] / grid[1])};
        races::begin_block(at, threads);
        if (is_loop) run_loop(order == 1);
        else run_block(random, order == 1, order > 1);
    }
    launch = nullptr;
    races::end_launch();
    if (current.error.empty()) return nullptr;
    // Fibers of this launch may be within a kernel, whose frames are abandoned.
    cuda_host::forget_started();
    for (size_t i = 0; !is_loop && i < threads; i++) current.fibers[i].started = false;
    char text[80];
    snprintf(text, sizeof text, "block (%u, %u, %u): ", blockIdx.x, blockIdx.y, blockIdx.z);
    error = text + current.error;
    return error.c_str();
}
