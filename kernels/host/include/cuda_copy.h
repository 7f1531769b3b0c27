// Replaces asynchronous copies. The bytes arrive at the latest possible time: when the thread waits
// for them. Until then they are NaN.
#pragma once

#include <string.h>

#include <vector>

#include "cuda_host.h"

namespace cuda_host {

struct Copy {
    void* to;
    const void* from;
    bool is_real;
    size_t bytes;
};

// The copies that this thread of the block has started.
inline std::vector<Copy>& copies() {
    thread_local std::vector<Copy> of_threads[1024];
    return of_threads[threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)];
}

inline void start_copy(void* to, const void* from, bool is_real, size_t bytes = 16) {
    if ((uintptr_t)to % bytes != 0 || (uintptr_t)from % bytes != 0) fail("an asynchronous copy that is not aligned to its size");
    memset(to, 0xff, bytes);
    copies().push_back({to, from, is_real, bytes});
}

inline void wait_for_copies() {
    for (const Copy& copy : copies()) {
        if (copy.is_real) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
    }
    copies().clear();
}

}  // namespace cuda_host
