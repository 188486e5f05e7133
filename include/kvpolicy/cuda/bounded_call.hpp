// SPDX-License-Identifier: Apache-2.0
//
// Attention that reads the rows which can matter (Read::bounded), as a device does it: bounds of all rows in halves
// (kernels/bound.cuh), attention to the others, a choice of units (kernels/choose_units.cuh), attention to these and
// the others, and a second choice, after which attention is repeated if it added any. Nothing is asked of the host:
// the repetition is launched in any case, and finds on the device whether there is anything to do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/bound_room.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/kernels/bound.cuh>
#include <kvpolicy/cuda/kernels/choose_units.cuh>
#include <kvpolicy/cuda/memory.hpp>

namespace kvpolicy::gpu {

/// One call of one layer of one sequence.
template <Element E>
class BoundedCall {
 public:
  /// `rows`: the rows of the text, at least; a head of which a graph finds more reads all. `has_halves`: some head has
  /// keys in halves. `params` are as Engine::attend has them, of one sequence; its heads are those of the cache.
  BoundedCall(const Engine<E>& engine, const AttendParams& params, const ReadBound& bound, std::size_t rows,
              bool has_halves)
      : engine_{&engine} {
    made_ = {.call = params,
             .most_units = static_cast<int>(std::min<std::size_t>(
                 bound.most_rows / tile_rows, static_cast<std::size_t>(std::numeric_limits<int>::max()))),
             .epsilon = bound.epsilon,
             .sure = bound.certainty == Certainty::sure,
             .unread = bound.unread.empty() ? nullptr : bound.unread.data()};
    static_assert(sizeof(std::size_t) == sizeof(unsigned long long));
    if (!bound.rows_read.empty()) {
      made_.rows_read = reinterpret_cast<unsigned long long*>(bound.rows_read.data());
    }
    const int columns = made_.columns();
    if (!needs_memory(bound, columns, has_halves)) return;
    extent_ = BoundExtent::of(rows, params.kv_heads, columns, engine.device().multiprocessors);
    made_.units = extent_.units;
    made_.blocks = extent_.blocks;
  }

  /// Whether rows are chosen at all, for which memory is needed: others' calls read every row.
  [[nodiscard]] static bool needs_memory(const ReadBound& bound, int columns, bool has_halves) {
    return has_halves && bound.epsilon > 0.0F && columns <= decode_most_columns;
  }

  /// Obtains the memory that the call needs. @throws std::bad_alloc, DeviceError
  void prepare(MemoryResource* memory, cudaStream_t stream) {
    if (made_.units == 0) return;
    block_ = allocate(memory, extent_.bytes(), stream);
    use(block_.get());
  }
  /// The same from a block that has room for it (BoundRoom).
  void use(std::byte* block) {
    if (made_.units == 0) return;
    ArrayCarver carver{block};
    made_.memory = extent_.carve(carver);
  }

  /// @throws DeviceError
  void run(bool packs, std::size_t longest, cudaStream_t stream) const {
    const AttendParams& call = made_.call;
    if (made_.units == 0) {
      engine_->attend(call, packs, longest, stream);
      if (made_.unread != nullptr || made_.rows_read != nullptr) engine_->choose_units(made_, true, stream);
      return;
    }
    engine_->enter(stream);
    engine_->bound(made_, stream);
    AttendParams reading = call;
    reading.heads = made_.memory.heads;
    reading.request.selected = true;
    reading.log_sum_exp = made_.memory.log_sum_exp;
    engine_->attend(reading, packs, longest, stream);
    engine_->choose_units(made_, false, stream);
    if (call.log_sum_exp != nullptr) reading.log_sum_exp = call.log_sum_exp;
    engine_->attend(reading, packs, longest, stream);
    engine_->choose_units(made_, true, stream);
    reading.ragged = made_.memory.again;
    const int queries = call.request.queries;
    engine_->attend_ragged(reading, {&queries, 1}, packs, longest, stream);
  }

 private:
  const Engine<E>* engine_;
  BoundParams made_;
  BoundExtent extent_;
  DeviceBuffer block_;
};

}  // namespace kvpolicy::gpu
