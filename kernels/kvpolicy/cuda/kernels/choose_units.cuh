// SPDX-License-Identifier: Apache-2.0
//
// Which units of rows in halves a call reads (Read::bounded): those with the largest bounds, until what the others can
// hold is no more than each query allows. core/bounded_attention.hpp has the same two choices on the host: a first one
// by an estimate of what all rows weigh, and a second one by what was read.
//
// One block for each KV head. Eleven bits of the units' largest shares decide which are read, by bisection: each pass
// adds up what the units below a bound can hold, in an order that does not depend on timing.
#pragma once

#include <cstdint>

#include <kvpolicy/cuda/kernels/bound.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>

namespace kvpolicy::gpu {

inline constexpr int choose_threads = select_threads;

struct ChooseShared {
  float of_warps[warp_lanes][decode_most_columns];
  float allowed[decode_most_columns];  ///< log2 of what each query allows to stay unread
  float left[decode_most_columns];     ///< what the units that are not read can hold, in parts of that
  float slack[decode_most_columns];
  bool known;
};
/// The selection's memory comes first (select_top).
constexpr std::size_t choose_shared_bytes() { return select_shared_bytes() + sizeof(ChooseShared); }

template <bool First>
class UnitChooser {
 public:
  KVPOLICY_DEVICE UnitChooser(const BoundParams& params)
      : p{params},
        shared{*reinterpret_cast<ChooseShared*>(shared_memory() + sizeof(SelectShared))},
        head{block_x()},
        columns{p.columns()},
        units{bounded_units(p, p.call.heads[head], *p.call.states)},
        largest{p.memory.largest + head * static_cast<long long>(p.units)},
        chosen{p.memory.chosen + head * static_cast<long long>(p.units)} {}

  KVPOLICY_DEVICE void run() {
    if (units > 0) {
      prepare();
      choose();
    }
    if constexpr (!First) report();
  }

 private:
  // A unit that is chosen has the largest of all numbers in `largest`.
  static constexpr std::uint32_t taken = 0x7f800000U;
  static constexpr int low_bits = 20;  // that do not decide

  KVPOLICY_DEVICE static float more(float a, float b) { return a > b ? a : b; }
  KVPOLICY_DEVICE static bool is_finite_number(float x) { return (bits_of_float(x) & 0x7fffffffU) < taken; }
  KVPOLICY_DEVICE static float size_of(float x) { return x < 0.0F ? -x : x; }

  KVPOLICY_DEVICE const float* of(const float* all, int column) const {
    return all + (head * static_cast<long long>(columns) + column) * p.units;
  }
  /// The place of a column's query among [tokens, q_heads].
  KVPOLICY_DEVICE int row_of(int column) const {
    return column / p.call.group * p.call.kv_heads * p.call.group + head * p.call.group +
           column % p.call.group;
  }
  /// The log-sum-exp of what was read, in log2.
  KVPOLICY_DEVICE float read_until_now(int column) const {
    const float* all = p.call.log_sum_exp == nullptr || First ? p.memory.log_sum_exp : p.call.log_sum_exp;
    return all[row_of(column)] * log2_e;
  }
  /// What was read weighs at least, if each logit may be off by the slack and arithmetic by what it is.
  KVPOLICY_DEVICE float least(int column) const {
    const float log_sum_exp = read_until_now(column);
    if (!is_finite_number(log_sum_exp)) return log_sum_exp;
    return log_sum_exp - shared.slack[column] - (0x1p-9F + 0x1p-18F * size_of(log_sum_exp));
  }

  /// Joins one number of each thread for each column; the results go to `to`, of which all threads then know.
  template <class Number, class Join>
  KVPOLICY_DEVICE void join_columns(const Number& number, const Join& join, float* to) const {
    for (int column = 0; column < columns; ++column) {
      float own = number(column);
      KVPOLICY_UNROLL
      for (int mask = 1; mask < warp_lanes; mask *= 2) own = join(own, shuffle_xor(own, mask));
      if (lane_index() == 0) shared.of_warps[warp_index()][column] = own;
    }
    sync_block();
    if (thread_index() < columns) {
      float all = shared.of_warps[0][thread_index()];
      for (int warp = 1; warp < thread_count() / warp_lanes; ++warp) {
        all = join(all, shared.of_warps[warp][thread_index()]);
      }
      to[thread_index()] = all;
    }
    sync_block();
  }
  KVPOLICY_DEVICE static float sum(float a, float b) { return a + b; }

  /// What each query allows, and the slacks; whether all is known.
  KVPOLICY_DEVICE void prepare() {
    if (thread_index() == 0) shared.known = true;
    if (thread_index() < columns) {
      float most = 0.0F;
      for (int block = 0; block < p.blocks; ++block) {
        most = more(most, p.memory.slack[(head * p.blocks + block) * columns + thread_index()]);
      }
      shared.slack[thread_index()] = most;
    }
    sync_block();
    bool known = true;
    for (int column = 0; column < columns; ++column) {
      const float* most = of(p.memory.most, column);
      for (int unit = thread_index(); unit < units; unit += thread_count()) {
        known = known && is_finite_number(most[unit]);
      }
    }
    if (thread_index() < columns) {
      const float read = read_until_now(thread_index());
      known = known && (is_finite_number(read) || read < 0.0F);
    }
    if (!known) shared.known = false;
    sync_block();
    if (!shared.known) return;
    if constexpr (First) {
      // `allowed` is the largest exponent until the sums are known, so that none is without end.
      join_columns(
          [&](int column) {
            float top = read_until_now(column);
            const float* most = of(p.memory.most, column);
            for (int unit = thread_index(); unit < units; unit += thread_count()) top = more(top, most[unit]);
            return top;
          },
          more, shared.allowed);
      join_columns(
          [&](int column) {
            float weight = 0.0F;
            const float* likely = of(p.memory.likely, column);
            for (int unit = thread_index(); unit < units; unit += thread_count()) {
              weight += exp2_approximate(likely[unit] - shared.allowed[column]);
            }
            return weight;
          },
          sum, shared.left);
      if (thread_index() < columns) {
        const float top = shared.allowed[thread_index()];
        const float weight =
            shared.left[thread_index()] + exp2_approximate(read_until_now(thread_index()) - top);
        shared.allowed[thread_index()] = top + log2_exact(p.epsilon * weight);
      }
    } else if (thread_index() < columns) {
      // What may be left for each part that was read. At an epsilon of 1 it would be without end.
      const float rest = 1.0F - p.epsilon;
      const float odds = p.epsilon < 1e6F * rest ? p.epsilon / rest : 1e6F;
      const float most = log2_exact(odds) + least(thread_index());
      shared.allowed[thread_index()] = most - (0x1p-9F + 0x1p-20F * size_of(most));
    }
    sync_block();
  }

  /// What a unit can hold for a query, in parts of what it allows.
  KVPOLICY_DEVICE float share(int column, int unit) const {
    const float power = of(p.memory.most, column)[unit] - shared.allowed[column];
    // More than rounding takes away; a number that is too large is as good as any other that is.
    return power > 100.0F ? 0x1p100F : exp2_approximate(power) * (1.0F + 0x1p-16F);
  }
  KVPOLICY_DEVICE bool is_taken(int unit) const { return bits_of_float(largest[unit]) == taken; }

  /// Adds up what units below `bound` can hold for each query; whether that is no more than each allows.
  KVPOLICY_DEVICE bool fits_below(std::uint32_t bound) const {
    join_columns(
        [&](int column) {
          float held = 0.0F;
          for (int unit = thread_index(); unit < units; unit += thread_count()) {
            if (bits_of_float(largest[unit]) >> low_bits < bound) held += share(column, unit);
          }
          return held;
        },
        sum, shared.left);
    bool fits = true;
    for (int column = 0; column < columns; ++column)
      fits = fits && shared.left[column] * (1.0F + 0x1p-12F) <= 1.0F;
    return fits;
  }

  KVPOLICY_DEVICE void choose() {
    const int before = First ? 0 : p.memory.counts[head];
    if (!shared.known) {
      if constexpr (First) {
        const int count = smaller(units, p.most_units);
        for (int i = thread_index(); i < count; i += thread_count()) chosen[i] = i;
        if (thread_index() == 0) p.memory.counts[head] = count;
      }
      return;
    }
    for (int unit = thread_index(); unit < units; unit += thread_count()) {
      if (!First && is_taken(unit)) continue;
      float most = 0.0F;
      for (int column = 0; column < columns; ++column) most = more(most, share(column, unit));
      largest[unit] = most;
    }
    sync_block();
    constexpr std::uint32_t all = taken >> low_bits;  // above every unit that is not taken
    if (fits_below(all)) return;
    std::uint32_t low = 0, high = all;  // what is below `low` fits, what is below `high` does not
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      (fits_below(middle) ? low : high) = middle;
    }
    // As many as are not below, and those that were chosen before, which are above all others.
    std::uint32_t own = 0;
    for (int unit = thread_index(); unit < units; unit += thread_count()) {
      own += bits_of_float(largest[unit]) >> low_bits >= low ? 1U : 0U;
    }
    const int wanted = count_in_block(own);
    const int count = smaller(wanted, larger(p.most_units, before));
    sync_block();
    select_top<choose_threads>([&](long long unit) { return bits_of_float(largest[unit]); }, units, count,
                               [&](int i, int unit) { chosen[i] = unit; });
    sync_block();
    for (int i = thread_index(); i < count; i += thread_count()) largest[chosen[i]] = float_of_bits(taken);
    if (thread_index() == 0) {
      p.memory.counts[head] = count;
      if (!First && count > before) p.memory.again->tokens = p.call.request.queries;
    }
    sync_block();
    static_cast<void>(fits_below(all));
  }

  /// The sum of a number of each thread, which is below 2^24 in all.
  KVPOLICY_DEVICE int count_in_block(std::uint32_t own) const {
    auto count = static_cast<float>(own);
    KVPOLICY_UNROLL
    for (int mask = 1; mask < warp_lanes; mask *= 2) count += shuffle_xor(count, mask);
    if (lane_index() == 0) shared.of_warps[warp_index()][0] = count;
    sync_block();
    float all = 0.0F;
    for (int warp = 0; warp < thread_count() / warp_lanes; ++warp) all += shared.of_warps[warp][0];
    return static_cast<int>(all);
  }

  KVPOLICY_DEVICE void report() const {
    const bool all = units == 0 || p.memory.counts[head] == units;
    if (p.unread != nullptr) {
      for (int column = thread_index(); column < columns; column += thread_count()) {
        p.unread[row_of(column)] = all ? 0.0F : shared.known ? unread(column) : 1.0F;
      }
    }
    if (p.rows_read == nullptr || thread_index() != 0) return;
    Request request = p.call.request;
    request.selected = p.memory.heads != nullptr;
    const HeadView& read = request.selected ? p.memory.heads[head] : p.call.heads[head];
    const DeviceSegmentList list = segments_of(read, *p.call.states, request);
    unsigned long long rows = 0;
    for (int s = 0; s < list.count; ++s) rows += static_cast<unsigned long long>(list.segment[s].rows);
    p.rows_read[head] += rows;
  }
  KVPOLICY_DEVICE float unread(int column) const {
    if (!is_finite_number(shared.allowed[column]) || !is_finite_number(shared.left[column])) return 1.0F;
    const float left = shared.left[column] * (1.0F + 0x1p-12F);
    const float beside = exp2_approximate(least(column) - shared.allowed[column]);
    return left / (left + beside);
  }

  const BoundParams& p;
  ChooseShared& shared;
  int head;
  int columns;
  int units;
  float* largest;
  int* chosen;
};

/// Grid (kv_heads), choose_shared_bytes(). The first choice comes after bound_kernel and after the exact rows were
/// attended, the second one after the chosen units were as well.
template <bool First>
KVPOLICY_KERNEL(choose_threads, 1)
choose_units_kernel(const KVPOLICY_GRID_CONSTANT BoundParams p) {
  UnitChooser<First>{p}.run();
}

}  // namespace kvpolicy::gpu
