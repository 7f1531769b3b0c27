// Replaces NVIDIA's header of this name.
#pragma once

#include "cuda_host.h"
