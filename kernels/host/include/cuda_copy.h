// Replaces asynchronous copies. The bytes arrive at the latest possible time: when the thread waits
// for them. Until then they are NaN.
#pragma once

#include "cuda_host.h"

namespace cuda_host {

void start_copy(void* to, const void* from, bool is_real, size_t bytes = 16);
void wait_for_copies();

}  // namespace cuda_host
