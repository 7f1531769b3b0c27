// See races.h.
//
// Each access has a stamp: its block, its thread, and the time of the thread. The time moves on
// when the thread passes a barrier. What orders accesses is what CUDA says:
//
// - __syncthreads orders those of a block, and __syncwarp those of the lanes in its mask. Shuffles,
//   votes and products order none.
// - Nothing orders two blocks of a launch.
// - Atomics do not race with each other. They race with other accesses, and order none.
// - An asynchronous access takes place at any time until the thread waits for it. Then it is
//   ordered like the thread's own.
//
// Two writes of the same value are a race too: a kernel cannot know it, and the hooks come before
// the value.
//
// Shared memory is that of one block. Memory on a stack, which only its thread uses, is not
// watched.

#include "races.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#define CUDA_HOST_RUNTIME
#include "include/cuda_host.h"

// The address in global memory of the race that ended the last launch of this host thread, or 0.
extern "C" thread_local uint64_t cuda_host_race;
thread_local uint64_t cuda_host_race = 0;

namespace {

using cuda_host::races::Addresses;

struct Stamp {
    uint64_t code : 48, thread : 10, is_set : 1, is_pending : 1;
    uint32_t block, time;
};

// Two accesses that a later write must be ordered after: the last one, and one by a thread as far
// apart from it as possible. If a barrier orders the write after both, it orders it after those in
// between.
struct Pair {
    Stamp last, other;
};

struct Cell {
    Stamp written;
    Pair read;
};

constexpr uintptr_t page_bytes = 1024;
// Bytes of a cell, until an access of fewer bytes.
constexpr size_t most_bytes_of_cell = 4;
// Atomics are of this size or a multiple.
constexpr uintptr_t atomic_bytes = 2;
// Pages that the next launch may find.
constexpr size_t most_pages = 1 << 14;

struct Page {
    uintptr_t start = 1;  // no page starts there
    bool is_shared = false;
    uint64_t use = 0;  // the launch, or for shared memory the block
    size_t bytes_of_cell = most_bytes_of_cell;
    std::unique_ptr<Cell[]> cells;
    std::map<uintptr_t, Pair> atomics;  // by address

    size_t count() const { return page_bytes / bytes_of_cell; }
};

enum class Kind { Read, Write, Atomic };

// Returns whether the bytes overlap the static shared memory of a module for this host thread, which
// is among the module's thread-local variables. `start` receives the start of these.
bool is_static_shared(uintptr_t address, size_t bytes, uintptr_t* start = nullptr) {
    struct Search {
        uintptr_t address, end, start;
    } search = {address, address + bytes, 0};
    const auto visit = [](dl_phdr_info* info, size_t, void* argument) {
        Search& search = *(Search*)argument;
        const uintptr_t first = (uintptr_t)info->dlpi_tls_data;
        if (first == 0 || first >= search.end) return 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
            if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
            if (search.address >= first + info->dlpi_phdr[i].p_memsz) continue;
            search.start = first;
            return 1;
        }
        return 0;
    };
    if (dl_iterate_phdr(visit, &search) == 0) return false;
    if (start != nullptr) *start = search.start;
    return true;
}

// The part of the host thread's stack below `frame`. Thread-local variables are above it.
Addresses stack_below(void* frame) {
    static thread_local void* const lowest = [] {
        pthread_attr_t attributes;
        void* start = nullptr;
        size_t bytes;
        if (pthread_getattr_np(pthread_self(), &attributes) != 0) return start;
        pthread_attr_getstack(&attributes, &start, &bytes);
        pthread_attr_destroy(&attributes);
        return start;
    }();
    return {(uintptr_t)lowest, (size_t)((char*)frame - (char*)lowest)};
}

// The function of an address in a kernel, and its source lines, from the innermost one on, as far
// as the module has them.
std::string source(uintptr_t code) {
    Dl_info module;
    if (dladdr((void*)code, &module) == 0) return "";
    char command[4400], line[4096];
    // The address is that after the call of a hook.
    snprintf(command, sizeof command, "addr2line -f -C -i -e '%s' %#zx 2> /dev/null", module.dli_fname,
             (size_t)(code - (uintptr_t)module.dli_fbase - 1));
    FILE* lines = popen(command, "r");
    if (lines == nullptr) return "";
    std::string function, places;
    for (bool is_function = true; fgets(line, sizeof line, lines) != nullptr; is_function = !is_function) {
        line[strcspn(line, "\n")] = 0;
        if (strchr(line, '?') != nullptr) continue;
        if (is_function) {
            function = line;
            continue;
        }
        const char* slash = strrchr(line, '/');
        places += (places.empty() ? "" : ", ") + std::string(slash == nullptr ? line : slash + 1);
    }
    pclose(lines);
    return (function.empty() ? "" : " in " + function) + (places.empty() ? "" : " (" + places + ")");
}

class Races {
public:
    Addresses stacks, host_stack, dynamic_shared;

    void begin_launch() {
        if (pages.size() > most_pages) {
            pages.clear();
            recent.fill(&none);
        }
        use_of_launch = ++uses;
        cuda_host_race = 0;
    }

    void begin_block(size_t index, size_t threads) {
        block = (uint32_t)index;
        use_of_block = ++uses;
        times.assign(threads, 1);
        published.assign(threads, 0);
        seen.assign(threads, {});
        phase = latest = 1;
    }

    void meet_at_block_barrier() {
        phase = ++latest;
        std::fill(times.begin(), times.end(), phase);
    }

    void meet_at_warp_barrier(size_t warp, unsigned mask) {
        const size_t first = 32 * warp;
        std::array<uint32_t, 32> all = {};
        for (size_t lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1)) continue;
            for (size_t of = 0; of < 32; of++) all[of] = std::max(all[of], seen[first + lane][of]);
            all[lane] = std::max(all[lane], times[first + lane]);
        }
        for (size_t lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1)) continue;
            seen[first + lane] = all;
            move_on(first + lane);
        }
    }

    void publish() {
        published[thread] = times[thread];
        move_on(thread);
    }

    void access(Kind kind, const void* address, size_t bytes, const void* code, bool is_pending = false, bool is_product = false) {
        const uintptr_t at = (uintptr_t)address;
        if (stacks.has(at) || host_stack.has(at)) return;
        const Stamp now = {(uint64_t)code, thread, 1, is_pending, block, times[thread]};
        for_pages(at, bytes, [&](Page& page, uintptr_t from, uintptr_t end) {
            for_cells(page, from, end, [&](Cell& cell, uintptr_t at) {
                check(kind, "writes", cell.written, now, at, is_product);
                if (kind == Kind::Read) {
                    add(cell.read, now);
                    return;
                }
                check(kind, "reads", cell.read.last, now, at);
                check(kind, "reads", cell.read.other, now, at);
                if (kind == Kind::Write) cell = {now, {}};
            });
            if (kind == Kind::Atomic || !page.atomics.empty()) check_atomics(kind, page, from, end, now);
        });
    }

    // Calls `each` with the stamps of the running thread's pending accesses, which are over now.
    void end_access(Kind kind, const void* address, size_t bytes) {
        const auto end = [&](Stamp& stamp) {
            if (!stamp.is_pending || stamp.thread != thread || stamp.block != block) return;
            stamp.is_pending = 0;
            stamp.time = times[thread];
        };
        for_pages((uintptr_t)address, bytes, [&](Page& page, uintptr_t from, uintptr_t until) {
            for_cells(page, from, until, [&](Cell& cell, uintptr_t) {
                if (kind == Kind::Write) return end(cell.written);
                end(cell.read.last);
                end(cell.read.other);
            });
        });
    }

    uint16_t thread = 0;

private:
    uint32_t block = 0, phase = 0, latest = 0;
    uint64_t uses = 0, use_of_launch = 0, use_of_block = 0;
    // By thread: its time, that of its last publication, and the times of the lanes of its warp
    // that it is ordered after.
    std::vector<uint32_t> times, published;
    std::vector<std::array<uint32_t, 32>> seen;
    std::unordered_map<uintptr_t, Page> pages;
    Page none;
    std::array<Page*, 1024> recent = all_none();

    std::array<Page*, 1024> all_none() {
        std::array<Page*, 1024> all;
        all.fill(&none);
        return all;
    }

    void move_on(size_t thread) { latest = std::max(latest, ++times[thread]); }

    Page& page_at(uintptr_t address) {
        const uintptr_t start = address / page_bytes * page_bytes;
        Page*& found = recent[address / page_bytes % recent.size()];
        if (found->start != start) {
            found = &pages[start];
            found->start = start;
        }
        if (found->use == (found->is_shared ? use_of_block : use_of_launch)) return *found;
        // The first use. In the launch before, it may have been other memory.
        found->is_shared = dynamic_shared.has(address) || is_static_shared(start, page_bytes);
        found->use = found->is_shared ? use_of_block : use_of_launch;
        found->atomics.clear();
        if (found->cells == nullptr) found->cells.reset(new Cell[found->count()]());
        else std::fill_n(found->cells.get(), found->count(), Cell{});
        return *found;
    }

    // Halves the cells until `bytes` is a multiple of their size.
    static void divide(Page& page, uintptr_t bytes) {
        size_t size = page.bytes_of_cell;
        while (bytes % size != 0) size /= 2;
        std::unique_ptr<Cell[]> cells(new Cell[page_bytes / size]);
        for (size_t i = 0; i < page_bytes / size; i++) cells[i] = page.cells[i * size / page.bytes_of_cell];
        page.cells = std::move(cells);
        page.bytes_of_cell = size;
    }

    template <class Each>
    void for_pages(uintptr_t at, size_t bytes, Each each) {
        for (const uintptr_t end = at + bytes; at < end;) {
            Page& page = page_at(at);
            const uintptr_t until = std::min(end, page.start + page_bytes);
            if ((at | until) % page.bytes_of_cell != 0) divide(page, at | until);
            each(page, at, until);
            at = until;
        }
    }

    template <class Each>
    static void for_cells(Page& page, uintptr_t from, uintptr_t end, Each each) {
        Cell* cell = &page.cells[(from - page.start) / page.bytes_of_cell];
        for (uintptr_t at = from; at < end; at += page.bytes_of_cell) each(*cell++, at);
    }

    bool is_ordered(const Stamp& before) const {
        if (before.is_pending || before.block != block) return false;
        if (before.thread == thread || before.time < phase) return true;
        return before.thread / 32 == thread / 32 && before.time <= seen[thread][before.thread % 32];
    }

    void check(Kind kind, const char* what, const Stamp& before, const Stamp& now, uintptr_t at, bool is_product = false) const {
        if (!before.is_set) return;
        if (!is_ordered(before)) report(kind, what, before, now, at, false);
        else if (is_product && before.time > published[before.thread]) report(kind, what, before, now, at, true);
    }

    // How far a stamp is from the running thread, as far as later writes are concerned.
    int distance(const Stamp& stamp) const {
        if (!stamp.is_set) return 0;
        if (stamp.block != block) return 3;
        if (stamp.time < phase && !stamp.is_pending) return 0;
        return stamp.thread / 32 != thread / 32 ? 2 : 1;
    }
    void add(Pair& pair, const Stamp& now) const {
        const bool is_own = pair.last.is_set && pair.last.thread == thread && pair.last.block == block;
        if (!is_own && distance(pair.other) <= distance(pair.last)) pair.other = pair.last;
        pair.last = now;
    }

    void check_atomics(Kind kind, Page& page, uintptr_t from, uintptr_t end, const Stamp& now) {
        for (uintptr_t at = from / atomic_bytes * atomic_bytes; at < end; at += atomic_bytes) {
            if (kind == Kind::Atomic) {
                add(page.atomics[at], now);
                continue;
            }
            const auto found = page.atomics.find(at);
            if (found == page.atomics.end()) continue;
            check(kind, "atomically changes", found->second.last, now, at);
            check(kind, "atomically changes", found->second.other, now, at);
            if (kind == Kind::Write) page.atomics.erase(found);
        }
    }

    static std::string index(const char* name, size_t at, const dim3& size) {
        char text[80];
        snprintf(text, sizeof text, "%s (%zu, %zu, %zu)", name, at % size.x, at / size.x % size.y, at / size.x / size.y);
        return text;
    }

    std::string place(uintptr_t at) const {
        char text[120];
        uintptr_t start;
        if (dynamic_shared.has(at)) snprintf(text, sizeof text, "byte %zu of dynamic shared memory", at - dynamic_shared.start);
        else if (is_static_shared(at, 1, &start)) snprintf(text, sizeof text, "byte %zu of static shared memory", at - start);
        else snprintf(text, sizeof text, "global memory at %#zx", at);
        return text;
    }

    [[noreturn]] void report(Kind kind, const char* what, const Stamp& before, const Stamp& now, uintptr_t at, bool is_unpublished) const {
        if (!dynamic_shared.has(at) && !is_static_shared(at, 1)) cuda_host_race = at;
        const char* does = kind == Kind::Read ? "reads" : kind == Kind::Write ? "writes" : "atomically changes";
        std::string text = "a race: " + index("thread", thread, blockDim) + " " + does + (now.is_pending ? " asynchronously " : " ")
                           + place(at) + source(now.code) + ", which " + index("thread", before.thread, blockDim);
        if (before.block != block) text += " of " + index("block", before.block, gridDim);
        text += std::string(" ") + what + source(before.code);
        text += is_unpublished           ? " and has not published"
                : before.is_pending      ? " asynchronously, without a wait before"
                : before.block != block  ? "; nothing orders two blocks"
                                         : ", without a barrier in between";
        cuda_host::fail("%s", text.c_str());
    }
};

thread_local std::unique_ptr<Races> of_host_thread;
// Null unless the launch finds races.
thread_local Races* current = nullptr;

}  // namespace

void cuda_host::races::begin_launch(Addresses stacks, Addresses dynamic_shared) {
    if (of_host_thread == nullptr) of_host_thread.reset(new Races);
    current = of_host_thread.get();
    current->stacks = stacks;
    current->host_stack = stack_below(__builtin_frame_address(0));
    current->dynamic_shared = dynamic_shared;
    current->begin_launch();
}
void cuda_host::races::end_launch() { current = nullptr; }
void cuda_host::races::begin_block(size_t block, size_t threads) {
    if (current != nullptr) current->begin_block(block, threads);
}
void cuda_host::races::run_thread(size_t thread) {
    if (current != nullptr) current->thread = (uint16_t)thread;
}
void cuda_host::races::meet_at_block_barrier() {
    if (current != nullptr) current->meet_at_block_barrier();
}
void cuda_host::races::meet_at_warp_barrier(size_t warp, unsigned mask) {
    if (current != nullptr) current->meet_at_warp_barrier(warp, mask);
}
void cuda_host::races::begin_write(const void* address, size_t bytes, const void* code) {
    if (current != nullptr) current->access(Kind::Write, address, bytes, code, true);
}
void cuda_host::races::end_write(const void* address, size_t bytes) {
    if (current != nullptr) current->end_access(Kind::Write, address, bytes);
}
void cuda_host::races::begin_read(const void* address, size_t bytes, bool is_product, const void* code) {
    if (current != nullptr) current->access(Kind::Read, address, bytes, code, true, is_product);
}
void cuda_host::races::end_read(const void* address, size_t bytes) {
    if (current != nullptr) current->end_access(Kind::Read, address, bytes);
}
void cuda_host::races::publish() {
    if (current != nullptr) current->publish();
}
void cuda_host::reads(const void* address, size_t bytes) {
    if (current != nullptr) current->access(Kind::Read, address, bytes, __builtin_return_address(0));
}
void cuda_host::changes_atomically(const void* address, size_t bytes, const void* code) {
    if (current != nullptr) current->access(Kind::Atomic, address, bytes, code);
}

// The hooks, which the compiler calls before each access.
#define HOOK(name, kind, bytes)                                                                               \
    extern "C" void __tsan_##name(const void* address) {                                                      \
        if (current != nullptr) current->access(Kind::kind, address, bytes, __builtin_return_address(0));          \
    }
#define HOOKS(bytes)              \
    HOOK(read##bytes, Read, bytes) \
    HOOK(write##bytes, Write, bytes)
#define UNALIGNED_HOOKS(bytes)                \
    HOOK(unaligned_read##bytes, Read, bytes) \
    HOOK(unaligned_write##bytes, Write, bytes)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
UNALIGNED_HOOKS(2)
UNALIGNED_HOOKS(4)
UNALIGNED_HOOKS(8)
UNALIGNED_HOOKS(16)
extern "C" void __tsan_read_range(const void* address, size_t bytes) {
    if (current != nullptr) current->access(Kind::Read, address, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(const void* address, size_t bytes) {
    if (current != nullptr) current->access(Kind::Write, address, bytes, __builtin_return_address(0));
}
// A file with hooks calls this when it is loaded.
extern "C" void __tsan_init() {}
