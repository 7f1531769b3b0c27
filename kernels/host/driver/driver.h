// The part of the driver that the libraries on top of it use.
#pragma once

#include <stdint.h>

#include <functional>
#include <vector>

namespace cuda_host {

// The memory that work uses: the address stands for its whole allocation.
struct Use {
    uint64_t address;
    bool is_write;
};

// Adds work to a stream, and counts it under `name`.
void enqueue(void* stream, const char* name, const std::vector<Use>& uses, std::function<void()> work);

// Returns whether `bytes` bytes at `address` lie inside one allocation. If not, writes a message
// and sets the error that later calls return.
bool is_inside(uint64_t address, uint64_t bytes, const char* name);

// Returns whether a test makes this call of `name` fail.
bool fails(const char* name);

}  // namespace cuda_host
