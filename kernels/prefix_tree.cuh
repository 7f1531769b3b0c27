// The table for a tree of sequences with shared prefixes (src/prefix_tree/cuda.rs): an entry per
// segment, level by level, and one after the last. A segment's children are adjacent.
#pragma once

#include <cstdint>

constexpr uint32_t NONE = 0xffffffffu;

struct Segment {
    uint32_t first;       // row
    uint32_t rows;
    uint32_t position;    // of its first row in its sequences
    uint32_t parent;      // or NONE
    uint32_t first_child; // The children of the next segment follow.
    uint32_t first_chunk; // The chunks of the next segment follow.
};

__device__ __forceinline__ Segment segment_at(const uint32_t *segments, uint32_t index) {
    const uint32_t *entry = segments + (uint64_t)index * 6;
    return {entry[0], entry[1], entry[2], entry[3], entry[4], entry[5]};
}
