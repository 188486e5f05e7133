// SPDX-License-Identifier: Apache-2.0
//
// The machine of kernels/kvpolicy/cuda/kernels/simt.cuh, emulated on the host: the same names with
// the same meaning, for kernels that g++ compiles. Included by simt.cuh where nvcc is not at work;
// <simt/launch.hpp> runs what was compiled.
//
// Stricter than a device: copies arrive as late as they may, memory is NaN until it is written,
// threads run in the worst order that a seed comes up with, and a broken rule (simt/fault.hpp) ends
// the launch with its place. Not emulated: warps that race inside one stretch between two meetings,
// and the timing of anything.
#pragma once

#include <cstddef>
#include <cstdint>

#define KVPOLICY_DEVICE inline
#define KVPOLICY_KERNEL(threads, blocks_per_multiprocessor) inline void
#define KVPOLICY_GRID_CONSTANT
#define KVPOLICY_UNROLL
#define KVPOLICY_NO_UNROLL

#include "collectives.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "numbers.hpp"

namespace kvpolicy::cuda {

inline int thread_index() { return simt::self->index; }
inline int thread_count() { return simt::self->block->grid->launch.threads; }
inline int lane_index() { return simt::self->lane; }
inline int warp_index() { return simt::self->index / warp_lanes; }
inline int block_x() { return simt::self->block->x; }
inline int block_y() { return simt::self->block->y; }
inline int grid_x() { return simt::self->block->grid->launch.grid_x; }
inline int grid_y() { return simt::self->block->grid->launch.grid_y; }

}  // namespace kvpolicy::cuda
