// The table of the kernels in a shared library that kernels/host/bin/nvcc compiles.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

namespace cuda_host {

// The memory that a kernel accesses through an argument, by the type of the argument. A table has
// the addresses of tensors, beside other numbers.
enum class Access : char { None, Read, Write, Table };

template <class A>
constexpr Access access_of() {
    using T = std::remove_pointer_t<A>;
    if (!std::is_pointer_v<A>) return Access::None;
    if (!std::is_const_v<T>) return Access::Write;
    return std::is_same_v<std::remove_const_t<T>, uint64_t> ? Access::Table : Access::Read;
}

// A kernel that takes pointers to its arguments, as cuLaunchKernel does.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    int count;
    const size_t* sizes;
    const Access* accesses;
    unsigned max_threads;  // of a block, from __launch_bounds__
};

template <class F>
struct Arguments;
template <class... A>
struct Arguments<void (*)(A...)> {
    static constexpr int count = sizeof...(A);
    static constexpr size_t sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
    static constexpr Access accesses[sizeof...(A) + 1] = {access_of<A>()..., Access::None};

    // The arguments are not in the memory of a GPU, so races are not found in it.
    template <void (*kernel)(A...), size_t... i>
    __attribute__((no_sanitize_thread)) static void apply(void** arguments, std::index_sequence<i...>) {
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
     cuda_host::Arguments<decltype(&kernel)>::sizes, cuda_host::Arguments<decltype(&kernel)>::accesses, bounds}
