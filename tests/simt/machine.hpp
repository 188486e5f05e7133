// SPDX-License-Identifier: Apache-2.0
//
// The machine of kernels/kvpolicy/cuda/kernels/simt.cuh, emulated on the host: the same names with the same
// meaning, for kernels that g++ compiles. simt.cuh includes this header if nvcc is not used;
// `simt/launch.hpp` runs the kernels.
//
// It is stricter than a device: copies arrive as late as they may, memory is NaN until it is written, threads
// run in the worst order that a seed gives, and a broken rule (simt/fault.hpp) ends the launch and names the
// thread. Two things are not emulated: races between warps that run without a meeting between them, and
// timing.
#pragma once

#include <cstddef>
#include <cstdint>

#define KVPOLICY_DEVICE inline
#define KVPOLICY_KERNEL(threads, blocks_per_multiprocessor) inline void
#define KVPOLICY_GRID_CONSTANT
#define KVPOLICY_UNROLL
#define KVPOLICY_NO_UNROLL
#define KVPOLICY_INLINE_LAMBDA

#include "collectives.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "numbers.hpp"

namespace kvpolicy::gpu {

inline void wait_for_kernel_before() { simt::self->block->grid->wait_for_kernel_before(); }
inline int thread_index() { return simt::self->index; }
inline int thread_count() { return simt::self->block->grid->launch.threads; }
inline int lane_index() { return simt::self->lane; }
inline int warp_index() { return simt::self->index / warp_lanes; }
inline int block_x() { return simt::self->block->x; }
inline int block_y() { return simt::self->block->y; }
inline int grid_x() { return simt::self->block->grid->launch.grid_x; }
inline int grid_y() { return simt::self->block->grid->launch.grid_y; }

}  // namespace kvpolicy::gpu
