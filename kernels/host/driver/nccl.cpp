// The operations of NCCL between processes of one machine, over shared memory. Sums are in the order
// of the ranks.
//
// As in NCCL, an operation waits without a limit for the other ranks, and a group starts its
// operations when it ends. A communicator that does not block connects on a thread of its own. Unlike
// in NCCL, its operations do block, several ranks may have the same device, and ranks that call
// different operations get an error.

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_bf16.h"
#include "driver.h"

namespace {

// ncclResult_t
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
// ncclDataType_t
enum { UINT8 = 1, FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9 };

constexpr int most_ranks = 64;
constexpr size_t slot_bytes = 256 << 10;

struct Call {
    int operation, type, root;
    size_t count;
    bool operator==(const Call& other) const {
        return operation == other.operation && type == other.type && root == other.root && count == other.count;
    }
};

// Shared by the ranks. New shared memory is 0.
struct Shared {
    std::atomic<uint32_t> arrived, generation;
    Call calls[most_ranks];
    alignas(64) char slots[][slot_bytes];
};

struct Comm {
    Shared* shared;
    int rank, ranks;
    std::atomic<bool> is_aborted{false};
    std::atomic<int> error{SUCCESS};

    // Waits for all ranks. Returns false after an abort.
    bool barrier() {
        const uint32_t generation = shared->generation.load();
        if (shared->arrived.fetch_add(1) + 1 == (uint32_t)ranks) {
            shared->arrived = 0;
            shared->generation++;
            return true;
        }
        while (shared->generation.load() == generation) {
            if (is_aborted) return false;
            usleep(20);
        }
        return true;
    }
    bool fail(const char* message) {
        fprintf(stderr, "cuda_host: nccl: %s\n", message);
        error = INVALID_USAGE;
        return false;
    }
};

struct UniqueId {
    char name[128];
};

// The first fields of ncclConfig_t.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

enum Operation { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

size_t element_bytes(int type) {
    switch (type) {
    case UINT8: return 1;
    case FLOAT32: return 4;
    case FLOAT64: return 8;
    case BFLOAT16: return 2;
    default: return 0;
    }
}

template <class T, class S>
void add(Comm* comm, char* to, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof(T); i++) {
        S sum = 0;
        for (int rank = 0; rank < comm->ranks; rank++) sum += (S)((const T*)comm->shared->slots[rank])[i];
        ((T*)to)[i] = (T)sum;
    }
}
void sum(Comm* comm, int type, char* to, size_t bytes) {
    switch (type) {
    case FLOAT64: return add<double, double>(comm, to, bytes);
    case BFLOAT16: return add<__nv_bfloat16, float>(comm, to, bytes);
    default: return add<float, float>(comm, to, bytes);
    }
}

// Copies from the slots what `to` receives, for each slot full of bytes.
bool run(Comm* comm, Call call, const char* send, char* receive) {
    Shared* shared = comm->shared;
    const size_t bytes = call.count * element_bytes(call.type);
    const size_t rank = (size_t)comm->rank, ranks = (size_t)comm->ranks;
    const size_t sent = call.operation == REDUCE_SCATTER ? ranks * bytes : bytes;
    const size_t received = call.operation == ALL_GATHER ? ranks * bytes : bytes;
    if (!cuda_host::is_inside((uint64_t)send, sent, "nccl: send") ||
        !cuda_host::is_inside((uint64_t)receive, received, "nccl: receive"))
        return comm->fail("an operation outside of the memory");
    shared->calls[rank] = call;
    if (!comm->barrier()) return false;
    for (size_t other = 0; other < ranks; other++)
        if (!(shared->calls[other] == call)) return comm->fail("the ranks call different operations");
    // A part for each rank, or one part.
    const size_t parts = call.operation == REDUCE_SCATTER ? ranks : 1;
    for (size_t part = 0; part < parts; part++)
        for (size_t at = 0; at < bytes; at += slot_bytes) {
            const size_t length = std::min(slot_bytes, bytes - at);
            if (call.operation != BROADCAST || rank == (size_t)call.root)
                memcpy(shared->slots[rank], send + part * bytes + at, length);
            if (!comm->barrier()) return false;
            switch (call.operation) {
            case ALL_REDUCE: sum(comm, call.type, receive + at, length); break;
            case REDUCE_SCATTER:
                if (part == rank) sum(comm, call.type, receive + at, length);
                break;
            case ALL_GATHER:
                for (size_t other = 0; other < ranks; other++)
                    memcpy(receive + other * bytes + at, shared->slots[other], length);
                break;
            default: memcpy(receive + at, shared->slots[call.root], length);
            }
            if (!comm->barrier()) return false;
        }
    return true;
}

// The operations of the group of this thread, and the number of groups that it is in.
struct Work {
    void* stream;
    std::vector<cuda_host::Use> uses;
    std::function<void()> run;

    void enqueue() const { cuda_host::enqueue(stream, "nccl", uses, run); }
};
thread_local std::vector<Work> group;
thread_local int depth;

int start(Call call, const void* send, void* receive, Comm* comm, void* stream) {
    if (element_bytes(call.type) == 0) return INVALID_ARGUMENT;
    if (cuda_host::fails("nccl")) return SYSTEM_ERROR;
    const Work work = {stream, {{(uint64_t)send, false}, {(uint64_t)receive, true}},
                       [=] { run(comm, call, (const char*)send, (char*)receive); }};
    if (depth > 0) group.push_back(work);
    else work.enqueue();
    return SUCCESS;
}

}  // namespace

extern "C" {

int ncclGetUniqueId(UniqueId* id) {
    std::random_device random;
    snprintf(id->name, sizeof id->name, "/cuda-on-host-nccl-%08x%08x", random(), random());
    return SUCCESS;
}

int ncclGetVersion(int* version) {
    *version = 21400;
    return SUCCESS;
}

int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, const Config* config) {
    if (ranks < 1 || ranks > most_ranks || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    if (config != nullptr && (config->size < sizeof(Config) || config->magic != 0xcafebeef)) return INVALID_ARGUMENT;
    const size_t bytes = sizeof(Shared) + (size_t)ranks * slot_bytes;
    const int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) return SYSTEM_ERROR;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return SYSTEM_ERROR;
    *comm = new Comm{(Shared*)memory, rank, ranks};
    const auto connect = [comm = *comm, id] {
        comm->barrier();
        if (comm->rank == 0) shm_unlink(id.name);
        comm->error = SUCCESS;
    };
    if (config == nullptr || config->blocking != 0) {
        connect();
        return SUCCESS;
    }
    (*comm)->error = IN_PROGRESS;
    // An aborted communicator stays in memory, so it outlives this thread.
    std::thread(connect).detach();
    return IN_PROGRESS;
}
int ncclCommInitRank(Comm** comm, int ranks, UniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
// The operations have run, because the caller has waited for the stream.
int ncclCommDestroy(Comm* comm) {
    munmap(comm->shared, sizeof(Shared) + (size_t)comm->ranks * slot_bytes);
    delete comm;
    return SUCCESS;
}
int ncclCommAbort(Comm* comm) {
    comm->is_aborted = true;
    return SUCCESS;
}
int ncclCommGetAsyncError(Comm* comm, int* error) {
    *error = comm->error;
    return SUCCESS;
}

int ncclGroupStart() {
    depth++;
    return SUCCESS;
}
int ncclGroupEnd() {
    if (depth == 0) return INVALID_USAGE;
    if (--depth > 0) return SUCCESS;
    for (const Work& work : std::exchange(group, {})) work.enqueue();
    return SUCCESS;
}

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int, Comm* comm, void* stream) {
    return start({ALL_REDUCE, type, 0, count}, send, receive, comm, stream);
}
int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int, Comm* comm, void* stream) {
    return start({REDUCE_SCATTER, type, 0, count}, send, receive, comm, stream);
}
int ncclAllGather(const void* send, void* receive, size_t count, int type, Comm* comm, void* stream) {
    return start({ALL_GATHER, type, 0, count}, send, receive, comm, stream);
}
int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Comm* comm, void* stream) {
    return start({BROADCAST, type, root, count}, send, receive, comm, stream);
}

const char* ncclGetErrorString(int error) {
    switch (error) {
    case SUCCESS: return "no error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    default: return "invalid usage";
    }
}
const char* ncclGetLastError(Comm*) { return ""; }

}  // extern "C"
