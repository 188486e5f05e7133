// SPDX-License-Identifier: Apache-2.0
//
// The CPU attention engine. It gives the same results as ScalarEngine up to rounding, with vectors and
// threads. Arithmetic is in float, with two exceptions. Calls of many queries over rows in bfloat16 may
// multiply bfloat16 numbers (Bfloat16Products says when, and what it costs). Few queries over low-bit rows
// multiply the codes as integers (integer_keys-inl.hpp, integer_values-inl.hpp; the error is far smaller
// than that of the quantisation).
//
// A call is cut into tiles of queries of one KV head. If these are too few to keep every thread busy, as in
// decoding, a tile's rows are cut into parts of equal cost, whose partial results are merged in order. The
// cut depends on the segments and the number of threads, never on timing, so equal calls give equal bits.
// Calls of several sequences are cut one by one, each as if it were alone, and share one parallel region: a
// sequence gets the same bits in any company.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cpu/parallel_for.hpp>
#include <kvpolicy/cpu/tree_mask.hpp>
#include <kvpolicy/cpu/worker-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// An AttentionEngine. Keys and values may have any multiple of 8 channels, and a GQA group any size. Rows
/// of a multiple of 16 channels are read where they are; others are copied, one row tile at a time. Calls
/// on one engine must not overlap, because they share scratch memory; all of it is allocated before
/// anything is written. A copy has its own scratch memory and a copy of the ParallelFor.
template <ParallelFor Parallel = DefaultParallelFor, class Tuning = DefaultTuning>
class Engine {
 public:
  Engine() = default;
  explicit Engine(Parallel parallel) : parallel_{std::move(parallel)} {}
  Engine(const Engine& other) : parallel_{other.parallel_} {}
  Engine(Engine&&) noexcept = default;
  Engine& operator=(const Engine& other) {
    parallel_ = other.parallel_;
    return *this;
  }
  Engine& operator=(Engine&&) noexcept = default;
  ~Engine() = default;

  /// @throws ShapeError for a head_dim or value_dim that 8 does not divide, std::bad_alloc
  void attend(const LayerAttention& work) { attend_all({&work, 1}); }

  /// The same for any number of calls, whose outputs must not overlap.
  /// @throws as `attend`, before anything is written
  void attend_all(std::span<const LayerAttention> works);

  /// @throws ShapeError for a head_dim or value_dim that 8 does not divide, std::bad_alloc
  void observe(const LayerObservation& work);

  /// @throws ShapeError for a query length that 8 does not divide, std::bad_alloc
  void score(const Plane& rows, std::span<const float> query, std::span<float> out);

  /// @throws ShapeError for a head_dim that 8 does not divide, std::bad_alloc
  void bound(const LayerBounds& work);

 private:
  // The rows that a tile sees, or a part of them that is cut by cumulated cost.
  struct Task {
    QueryTile tile;
    std::size_t call;  // which of the calls it belongs to
    std::size_t from, to;
    std::size_t parts;    // number of parts of the tile; their tasks are consecutive
    std::size_t partial;  // where its partial result begins, in floats, if parts > 1
  };

  // Some rows whose bounds some queries of a KV head ask for. Units begin where parts do.
  struct BoundTask {
    Segment rows;
    QueryTile tile;
    UnitBound* out;     // of the tile's first query
    std::size_t units;  // of the head
  };
  static constexpr std::size_t bound_rows = 2048;
  static_assert(bound_rows % bounded_unit == 0);

  // What the calls together want of every worker.
  struct Needs {
    std::size_t queries = 0;  // most query rows of a task
    HeadWidth width{0, 0};
    std::size_t words = 0;
    bool tiled = false;
  };

  [[nodiscard]] std::size_t threads() const {
    return std::max<std::size_t>(static_cast<std::size_t>(parallel_.threads()), 1);
  }

  // The padded width of a side with so many channels.
  static std::size_t checked(const char* name, std::size_t channels) {
    require<ShapeError>(channels > 0 && channels % 8 == 0, "cpu::Engine: ", name, " is ", channels,
                        ", must be a positive multiple of 8");
    return padded_channels(channels);
  }

  [[nodiscard]] static std::size_t part_begin(std::size_t cost, std::size_t part, std::size_t parts) {
    // Not cost * part / parts, which could overflow.
    return cost / parts * part + cost % parts * part / parts;
  }

  // The most queries of a tile over these rows. Rows that every tile packs for itself ask for large ones, but the
  // queries of a tile should be few beside a window, because each sees rows that the others do not.
  [[nodiscard]] static std::size_t tile_queries(std::span<const Segment> segments,
                                                const ProductPlan& products, std::size_t group) {
    if (products.unit != MatrixUnit::tiles) return Tuning::tile_queries;
    constexpr std::size_t most = std::max(Tuning::tile_queries, Tuning::paired_queries);
    std::int64_t window = 8 * most;  // a longer one asks for no smaller tile
    for (const Segment& segment : segments) window = std::min(window, segment.window);
    return std::clamp(static_cast<std::size_t>(std::max<std::int64_t>(window, 0)) / 8 * group,
                      Tuning::tile_queries, most);
  }

  // Adds the tasks of one call; returns the largest number of query rows of a task.
  std::size_t add_tasks(const LayerAttention& work, std::size_t call, TreeMask* tree) {
    const std::size_t group = work.queries_per_kv();
    const std::size_t rows = work.queries.tokens * group;
    std::size_t largest = 0;
    if (tree != nullptr) tree->set(work);
    whole_.clear();
    std::size_t total = 0;
    for (std::size_t head = 0; head < work.heads.size(); ++head) {
      std::size_t most = rows;
      if (rows > Tuning::stream_queries) {
        most = std::min(rows, tile_queries(work.heads[head], products_[call], group));
        if (most < rows && group < most) most -= most % group;  // whole tokens
      }
      largest = std::max(largest, most);
      // Late tokens see the most rows. They come first, so that the last tasks to end are short.
      for (std::size_t end = rows; end > 0;) {
        const std::size_t first = (end - 1) / most * most;
        QueryTile tile{
            work.queries,         work.first_position, group, head, first, end - first, work.scale(),
            work.options.softcap, work.out.head_dim};
        if (tree != nullptr) tile.use_tree(*tree);
        const std::size_t cost = seen_cost(work.heads[head], tile);
        whole_.push_back({tile, call, 0, cost, 1, 0});
        total += cost;
        end = first;
      }
    }
    const std::size_t wanted = threads() * Tuning::tasks_per_thread;
    if (threads() > 1 && whole_.size() < wanted) {
      cut_tasks(total / wanted + 1,
                Partial::floats(padded_queries(largest), padded_channels(work.out.head_dim)));
    } else {
      tasks_.insert(tasks_.end(), whole_.begin(), whole_.end());
    }
    return largest;
  }

  // Lists the tasks of all calls.
  Needs plan(std::span<const LayerAttention> works) {
    tasks_.clear();
    partial_floats_ = 0;
    products_.assign(works.size(), {});
    trees_.resize(
        std::max(trees_.size(), static_cast<std::size_t>(std::ranges::count_if(
                                    works, [](const auto& work) { return work.options.tree != nullptr; }))));
    Needs needs;
    std::size_t trees = 0;
    for (std::size_t call = 0; call < works.size(); ++call) {
      const LayerAttention& work = works[call];
      if (work.queries.tokens == 0 || work.heads.empty()) continue;
      const HeadWidth width{checked("head_dim", work.queries.head_dim),
                            checked("value_dim", work.out.head_dim)};
      TreeMask* tree = work.options.tree == nullptr ? nullptr : &trees_[trees++];
      // Decoding does not plan for tiles, so it does not request AMX: tile registers enlarge every signal
      // frame of the process.
      const bool tiled = work.queries.tokens * work.queries_per_kv() > Tuning::stream_queries;
      if (tiled) products_[call] = product_plan(work.queries, work.out.encoding);
      const std::size_t queries = add_tasks(work, call, tree);
      needs.queries = std::max(needs.queries, queries);
      needs.width = {std::max(needs.width.keys, width.keys), std::max(needs.width.values, width.values)};
      needs.words = std::max(needs.words, Worker<Tuning>::scratch_words(queries, width, products_[call]));
      needs.tiled = needs.tiled || tiled;
    }
    return needs;
  }

  // The most threads of a call of few queries: one for each `task_weight` of cost, because waking a thread takes as
  // long as reading that much. Which thread takes a task does not change its result.
  [[nodiscard]] std::size_t worthwhile_threads() const {
    std::size_t cost = 0;
    for (const Task& task : tasks_) cost += task.to - task.from;
    return std::clamp<std::size_t>(cost / Tuning::task_weight, 1, tasks_.size());
  }

  // Adds the call's tasks in parts of about this cost. `partial`: floats of a partial result.
  void cut_tasks(std::size_t share, std::size_t partial) {
    share = std::max(share, Tuning::task_weight);
    for (const Task& task : whole_) {
      const std::size_t parts = std::max<std::size_t>((task.to + share / 2) / share, 1);
      for (std::size_t part = 0; part < parts; ++part) {
        tasks_.push_back({task.tile, task.call, part_begin(task.to, part, parts),
                          part_begin(task.to, part + 1, parts), parts, partial_floats_});
        if (parts > 1) partial_floats_ += partial;
      }
    }
  }

  [[nodiscard]] static ProductPlan product_plan(const ConstTensor& queries, Encoding out) {
    if (Tuning::bfloat16_products == Bfloat16Products::never) return {};
    return {Tuning::bfloat16_products, Tuning::matrix_unit(), queries.encoding, out};
  }

  // Reserves workers, at most `count`.
  void reserve(std::size_t count, std::size_t queries, const HeadWidth& width, std::size_t scratch_words) {
    active_ = std::min(threads(), count);
    if (workers_.size() < active_) workers_.resize(active_);
    for (std::size_t i = 0; i < active_; ++i) workers_[i].reserve(queries, width, scratch_words);
  }

  // Runs all indices; every worker takes the next index until none is left.
  template <class Run>
  void for_each(std::size_t count, Run run) {
    std::atomic<std::size_t> next{0};
    parallel_(active_, [&](std::size_t worker) {
      for (std::size_t i = next++; i < count; i = next++) run(i, workers_[worker]);
    });
  }

  Parallel parallel_;
  std::vector<Task> tasks_;
  std::vector<Task> whole_;  // those of one call before they are cut
  std::size_t partial_floats_ = 0;
  std::vector<BoundTask> bounds_;
  std::vector<TreeMask> trees_;        // of the calls with a tree
  std::vector<ProductPlan> products_;  // of each call
  AlignedFloats partials_;
  std::vector<Worker<Tuning>> workers_;
  std::size_t active_ = 0;
};

// Outside the class for the sake of `extern template`, as in worker-inl.hpp.

template <ParallelFor Parallel, class Tuning>
void Engine<Parallel, Tuning>::attend_all(std::span<const LayerAttention> works) {
  const Needs needs = plan(works);
  if (tasks_.empty()) return;
  float* partials = partials_.resize(partial_floats_);
  const auto partial_of = [&](const Task& task) {
    return Partial{partials + task.partial, padded_queries(task.tile.rows)};
  };
  reserve(needs.tiled ? tasks_.size() : worthwhile_threads(), needs.queries, needs.width, needs.words);
  for_each(tasks_.size(), [&](std::size_t i, Worker<Tuning>& worker) {
    const Task& task = tasks_[i];
    const LayerAttention& work = works[task.call];
    const bool whole = task.parts == 1;
    const Partial result = whole ? worker.own_partial(task.tile) : partial_of(task);
    worker.attend(work.heads[task.tile.kv_head], task.tile, task.from, task.to, products_[task.call], result);
    if (whole) result.finish(work, task.tile);
  });
  for (std::size_t first = 0; first < tasks_.size(); first += tasks_[first].parts) {
    const Task& task = tasks_[first];
    if (task.parts == 1) continue;
    const Partial total = partial_of(task);
    for (std::size_t i = 1; i < task.parts; ++i) {
      total.merge_with(partial_of(tasks_[first + i]), task.tile.rows, task.tile.width().values);
    }
    total.finish(works[task.call], task.tile);
  }
}

template <ParallelFor Parallel, class Tuning>
void Engine<Parallel, Tuning>::observe(const LayerObservation& work) {
  if (work.heads.empty()) return;
  const std::size_t group = work.queries_per_kv();
  const std::size_t rows = work.queries.tokens * group;
  const HeadWidth width{checked("head_dim", work.queries.head_dim), 0};
  const ProductPlan products = product_plan(work.queries, Encoding::bfloat16);  // no weight is multiplied
  reserve(work.heads.size(), Tuning::tile_queries, width,
          Worker<Tuning>::scratch_words(Tuning::tile_queries, width, products));
  for_each(work.heads.size(), [&](std::size_t head, Worker<Tuning>& worker) {
    if (work.heads[head].empty()) return;
    std::ranges::fill(work.sums[head], 0.0F);
    for (std::size_t first = 0; first < rows; first += Tuning::tile_queries) {
      const QueryTile tile{
          work.queries, work.first_position, group, head, first, std::min(Tuning::tile_queries, rows - first),
          work.scale(), work.options.softcap};
      worker.observe(work.heads[head], tile, products, work.options.attention_sink_bias, work.votes,
                     work.sums[head]);
    }
  });
}

template <ParallelFor Parallel, class Tuning>
void Engine<Parallel, Tuning>::score(const Plane& rows, std::span<const float> query, std::span<float> out) {
  if (out.empty()) return;
  // All rows come before the query, so it sees all of them.
  const Segment segment{.keys = rows, .values = rows, .rows = out.size()};
  QueryTile tile;
  const std::size_t width = checked("head_dim", query.size());
  tile.queries.head_dim = tile.value_dim = query.size();
  tile.first_position = static_cast<std::int64_t>(out.size());
  tile.rows = 1;
  const std::size_t cost = seen_cost({&segment, 1}, tile);
  const std::size_t parts = std::clamp<std::size_t>(cost / Tuning::task_weight, 1, threads());
  reserve(parts, 1, {width, width}, 0);
  for_each(parts, [&](std::size_t part, Worker<Tuning>& worker) {
    worker.score(segment, tile, query, part_begin(cost, part, parts), part_begin(cost, part + 1, parts), out);
  });
}

template <ParallelFor Parallel, class Tuning>
void Engine<Parallel, Tuning>::bound(const LayerBounds& work) {
  if (work.heads.empty()) return;
  const std::size_t group = work.queries_per_kv();
  const std::size_t queries = work.queries.tokens * group;
  const std::size_t width = checked("head_dim", work.queries.head_dim);
  bounds_.clear();
  for (std::size_t head = 0; head < work.heads.size(); ++head) {
    std::ranges::fill(work.units[head], UnitBound{});
    const std::size_t units = units_of(work.heads[head]);
    UnitBound* out = work.units[head].data();
    for (const Segment& segment : work.heads[head]) {
      for (std::size_t row = 0; row < segment.rows; row += bound_rows) {
        // All rows come before the queries, so these see all of them.
        Segment rows = segment.part(row, std::min(bound_rows, segment.rows - row));
        rows.position = 0;
        rows.window = unlimited_window;
        for (std::size_t q = 0; q < queries; q += Tuning::stream_queries) {
          const QueryTile tile{work.queries,
                               static_cast<std::int64_t>(bound_rows),
                               group,
                               head,
                               q,
                               std::min(Tuning::stream_queries, queries - q),
                               work.scale,
                               work.softcap};
          bounds_.push_back({rows, tile, out + q * units + row / bounded_unit, units});
        }
      }
      out += units_of(segment.rows);
    }
  }
  if (bounds_.empty()) return;
  std::size_t cost = 0;
  for (const BoundTask& task : bounds_) cost += seen_cost({&task.rows, 1}, task.tile);
  reserve(std::clamp<std::size_t>(cost / Tuning::task_weight, 1, bounds_.size()),
          std::min(queries, Tuning::stream_queries), {width, 0}, 0);
  for_each(bounds_.size(), [&](std::size_t i, Worker<Tuning>& worker) {
    const BoundTask& task = bounds_[i];
    worker.bound(task.rows, task.tile, work.certainty, task.out, task.units);
  });
}

static_assert(BatchedEngine<Engine<SerialFor>> && BoundingEngine<Engine<SerialFor>>);

/// The engine as it ships; SPEC is `template` or `extern template` (kvpolicy/cpu/instances.hpp).
#ifdef _OPENMP
#define KVPOLICY_CPU_ENGINE_INSTANCE(SPEC) \
  SPEC class Worker<DefaultTuning>;        \
  SPEC class Engine<SerialFor>;            \
  SPEC class Engine<OpenMpFor>;
#else
#define KVPOLICY_CPU_ENGINE_INSTANCE(SPEC) \
  SPEC class Worker<DefaultTuning>;        \
  SPEC class Engine<SerialFor>;
#endif
#ifdef KVPOLICY_SEPARATE_COMPILATION
KVPOLICY_CPU_ENGINE_INSTANCE(extern template)
#endif

}  // namespace HWY_NAMESPACE

using HWY_NAMESPACE::Engine;

}  // namespace kvpolicy::cpu
