// The table of the kernels in a shared library that kernels/host/bin/nvcc compiles.
#pragma once

#include <stddef.h>

#include <type_traits>
#include <utility>

namespace cuda_host {

// A kernel that takes pointers to its arguments, as cuLaunchKernel does.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    int count;
    const size_t* sizes;
    unsigned max_threads;  // of a block, from __launch_bounds__
};

template <class F>
struct Arguments;
template <class... A>
struct Arguments<void (*)(A...)> {
    static constexpr int count = sizeof...(A);
    static constexpr size_t sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};

    template <void (*kernel)(A...), size_t... i>
    static void apply(void** arguments, std::index_sequence<i...>) {
        kernel(*(std::remove_const_t<A>*)arguments[i]...);
    }
    template <void (*kernel)(A...)>
    static void call(void** arguments) {
        apply<kernel>(arguments, std::index_sequence_for<A...>{});
    }
};

constexpr unsigned first(unsigned bound, unsigned = 0, unsigned = 0) { return bound; }

}  // namespace cuda_host

#ifdef CUDA_HOST_LIST
// Marks that nvcc finds in the preprocessed source.
#undef __global__
#define __global__ CUDA_HOST_KERNEL
#undef __launch_bounds__
#define __launch_bounds__(...) CUDA_HOST_BOUNDS(__VA_ARGS__)
#endif
#ifndef CUDA_HOST_LIST
#define CUDA_HOST_BOUNDS(...) cuda_host::first(__VA_ARGS__)
#endif
#define CUDA_HOST_TABLE extern "C" __attribute__((visibility("default"))) const cuda_host::Kernel cuda_host_kernels[]
#define CUDA_HOST_ENTRY(kernel, bounds)                                                                \
    {#kernel, cuda_host::Arguments<decltype(&kernel)>::call<&kernel>, cuda_host::Arguments<decltype(&kernel)>::count, \
     cuda_host::Arguments<decltype(&kernel)>::sizes, bounds}
