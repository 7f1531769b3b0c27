// Places where decoding keeps a sequence: positions in pages, and states.
#pragma once

#include <cstdint>

// No place: nothing is written. Steps of a size that is rounded up have such rows.
constexpr uint32_t NO_SLOT = 0xffffffffu;
