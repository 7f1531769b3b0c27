// Replaces asynchronous copies. The bytes arrive at the latest possible time: when the thread waits
// for them. Until then they are NaN.
#pragma once

#include "cuda_host.h"

namespace cuda_host {

// Copies the first `real` of `bytes` bytes, with zeros after them.
void start_copy(void* to, const void* from, size_t real, size_t bytes);
void wait_for_copies();

}  // namespace cuda_host
