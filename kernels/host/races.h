// Finds races between the threads of a launch: two accesses to the same bytes, at least one of
// which is a write, that nothing orders. That they have an order here, and are right in it, does
// not matter.
//
// Kernels are compiled with the hooks of -fsanitize=thread, without its runtime. races.cpp has the
// hooks, and remembers for each byte the last write and the last reads.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace cuda_host {

// Forgets the asynchronous copies and products that a failed launch has started.
void forget_started();

namespace races {

struct Addresses {
    uintptr_t start;
    size_t bytes;
    bool has(uintptr_t address) const { return address - start < bytes; }
};

// From here on, the launch of this host thread finds races. `stacks` are those of its fibers.
void begin_launch(Addresses stacks, Addresses dynamic_shared);
void end_launch();

// The functions below do nothing without such a launch.

void begin_block(size_t block, size_t threads);
// The hooks are called by this thread of the block.
void run_thread(size_t thread);
void meet_at_block_barrier();
void meet_at_warp_barrier(size_t warp, unsigned mask);

// An asynchronous access of the running thread is pending from its start to the wait for it. `code`
// is an address in the kernel.
void begin_write(const void* address, size_t bytes, const void* code);
void end_write(const void* address, size_t bytes);
// A product reads what other threads have written only if they have published it.
void begin_read(const void* address, size_t bytes, bool is_product, const void* code);
void end_read(const void* address, size_t bytes);
// Publishes what the running thread has written so far: see publish_operands in warpgroup.cuh.
void publish();

}  // namespace races
}  // namespace cuda_host
