// SPDX-License-Identifier: Apache-2.0
//
// Launches the kernels for one model shape on one device: which instance, how many blocks, which
// workspace. A cache asks it for whole operations on a layer; an engine with caches of its own can
// call `attend` with descriptions of heads that it made itself (kernels/head.cuh).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/attend_launches.hpp>
#include <kvpolicy/cuda/dispatch.hpp>
#include <kvpolicy/cuda/kernel_tables.hpp>
#include <kvpolicy/cuda/kernels/accept.cuh>
#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/column_sums.cuh>
#include <kvpolicy/cuda/kernels/compact.cuh>
#include <kvpolicy/cuda/kernels/gather.cuh>
#include <kvpolicy/cuda/kernels/observe.cuh>
#include <kvpolicy/cuda/kernels/score.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/shared_budget.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>
#include <kvpolicy/cuda/kernels/stage.cuh>
#include <kvpolicy/cuda/kernels/votes.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/own_kernels.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/cuda/staging.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>

namespace kvpolicy::gpu {

/// Launches the kernels, for all caches that share it.
/// Not synchronised. Its workspace serves one stream at a time: work on another one waits for what came before, so
/// caches that are to work side by side need engines of their own. The stream of its latest call must live until the
/// next call, or until the cache that made it is gone.
template <Element E>
class Engine {
 public:
  /// The most heads (sequences x KV heads) of a call, whatever the device; see most_heads().
  static constexpr std::size_t max_heads = AttendLaunches<E>::max_heads;

  /// @throws ConfigError for a head_dim that is not compiled, a group of more than 16 query heads or more KV heads than
  /// most_heads(), CaptureError inside a capture, DeviceError without a device whose blocks have enough shared memory,
  /// std::bad_alloc
  explicit Engine(const ModelShape& shape, MemoryResource* memory = default_memory(),
                  cudaStream_t stream = nullptr)
      : shape_{checked(shape)},
        device_{Device::current()},
        memory_{memory},
        attention_{shape, device_},
        order_{stream},
        own_kernels_{shape.head_dim} {
    require<CaptureError>(!is_capturing(stream),
                          "gpu::Engine: memory cannot be asked for inside a "
                          "graph, but the stream captures");
    dispatch_head_dim(shape.head_dim, [&]<int D>() { take_kernels<D>(); });
    own_kernels_.add(KeyNormScorer::name, rows_.key_norms);
    workspace_ = allocate(memory_, own_bytes(), stream);
    // Tickets are zero between calls; what blocks leave for each other needs no beginning.
    check(cudaMemsetAsync(workspace_.get(), 0, attention_.counts().tickets * sizeof(std::uint32_t), stream),
          "cudaMemsetAsync");
    order_.mark();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {
    const LastUse use = LastUse::of_many(order_.end());
    workspace_.give_back_on(use);
    accumulation_.give_back_on(use);
    if (staging_ != nullptr) staging_->give_back_on(use);
  }

  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  [[nodiscard]] const Device& device() const { return device_; }
  /// Sequences x KV heads that one call may bring on this device (AttendLaunches::most_heads).
  [[nodiscard]] std::size_t most_heads() const { return attention_.most_heads(); }
  /// Whether calls of many queries are served by Hopper's kernel (kernels/prefill_hopper.cuh), if no head packs: on a
  /// device of compute capability 9.0, for head_dim 64, 128 and 256, where the program was compiled for sm_90a.
  [[nodiscard]] bool uses_warpgroups() const { return attention_.uses_warpgroups(); }
  /// Whether attention's kernels begin before the one in front of them on the stream has ended (Grid::early): where the device
  /// runs code that was written for compute capability 9.0 or later.
  [[nodiscard]] bool launches_early() const { return attention_.launches_early(); }
  /// With the buffers through which rows in slow memory are read, and with those for adding up attention.
  [[nodiscard]] std::size_t workspace_bytes() const {
    return own_bytes() + staging_bytes() + (accumulation_ == nullptr ? 0 : observe_bytes());
  }
  [[nodiscard]] std::size_t staging_bytes() const { return staging_ == nullptr ? 0 : staging_->bytes(); }

  /// Work that uses the engine's memory is about to be put on `stream`. @throws DeviceError
  void enter(cudaStream_t stream) const { order_.enter(stream); }
  /// No more of it comes on `stream` for now, which may go.
  void leave(cudaStream_t stream) const noexcept {
    KVPOLICY_TRY { order_.release(stream); }
    KVPOLICY_CATCH_ALL { static_cast<void>(cudaStreamSynchronize(stream)); }
  }

  /// Serves heads that rank their rows by a key scorer of the caller's own (GatheringKeyScorer), or whose chunks
  /// have a ChannelSummary of the caller's own: compiles the kernels here. To be called before caches with such
  /// heads are made.
  template <class S>
  void serve() {
    own_kernels_.template add<S>();
  }
  [[nodiscard]] const OwnKernels<E>& own_kernels() const { return own_kernels_; }

  // ---- rows in slow memory

  /// Where layers are staged; made when it is asked for first. @throws std::bad_alloc, DeviceError
  [[nodiscard]] Staging& staging() {
    if (staging_ == nullptr) staging_ = std::make_unique<Staging>(shape_.kv_heads, memory_);
    return *staging_;
  }
  /// Work put on `stream` from now on comes after the copies that are on the way.
  void join_copies(cudaStream_t stream) const noexcept {
    if (staging_ != nullptr) staging_->join(stream);
  }
  /// Descriptions of a layer's heads, on the device, whose page tables point to the staged pages at `rows`.
  /// @throws DeviceError
  [[nodiscard]] const HeadView* describe_staged(const HeadView* heads, const LayerState* state, bool selected,
                                                std::byte* rows, std::size_t page_rows,
                                                cudaStream_t stream) const {
    const int kv_heads = static_cast<int>(shape_.kv_heads);
    const StageParams params{.from = heads,
                             .state = state,
                             .page_rows = static_cast<int>(page_rows),
                             .selected = selected,
                             .rows = rows,
                             .table = staging_->table(),
                             .to = staging_->views()};
    launch(common().stage, {.x = quotient_up(device_.multiprocessors, kv_heads), .y = kv_heads}, stream,
           params);
    return staging_->views();
  }
  /// Copies the chosen rows of heads in slow memory to the device, except for those that are there already.
  /// @throws DeviceError
  void gather(const HeadView* heads, const LayerState* states, std::size_t page_rows,
              cudaStream_t stream) const {
    const int kv_heads = static_cast<int>(shape_.kv_heads);
    const GatherParams params{.heads = heads,
                              .states = states,
                              .kv_heads = kv_heads,
                              .page_rows = static_cast<int>(page_rows),
                              .head_dim = static_cast<int>(shape_.head_dim)};
    launch(common().gather, {.x = quotient_up(2 * device_.multiprocessors, kv_heads), .y = kv_heads}, stream,
           params);
  }

  /// Attention of one layer (kernels/attend.cuh says what `params` are; workspace and splits are the
  /// engine's to fill in). `packs`: some head may have quantised rows. `longest`: about the most
  /// rows that a query reads of a head, by which the work of few query tiles is split.
  /// @throws DeviceError
  void attend(AttendParams params, bool packs, std::size_t longest, cudaStream_t stream) const {
    attention_.check_heads(params.sequences, params.kv_heads);
    attention_.check_queries(params.request.queries, params.group);
    params.workspace = workspace();
    enter(stream);
    attention_.attend(params, packs, longest, stream);
  }

  /// The same for a ragged call (AttendParams::ragged): `queries` are those of each sequence, 0 where nothing is to be
  /// done. One launch serves the sequences of few queries and one those of many, whatever their number.
  /// @throws DeviceError
  void attend_ragged(AttendParams params, std::span<const int> queries, bool packs, std::size_t longest,
                     cudaStream_t stream) const {
    attention_.check_heads(params.sequences, params.kv_heads);
    for (const int count : queries) attention_.check_queries(count, params.group);
    params.workspace = workspace();
    enter(stream);
    attention_.attend_ragged(params, queries, packs, longest, stream);
  }

  /// New rows and what they commit. `jobs`: about how many blocks and chunks are committed at most.
  /// `slow`: some head is in slow memory; `flushes`: some head has KIVI's flush; `own_summaries`: names of
  /// summaries of the caller's own that some head has. @throws DeviceError
  void append(AppendParams params, std::size_t jobs, cudaStream_t stream, bool slow = false,
              bool flushes = false, std::span<const std::string_view> own_summaries = {}) const {
    attention_.check_heads(params.sequences, params.kv_heads);
    params.tickets = tickets();
    enter(stream);
    const int heads = params.kv_heads * params.sequences;
    const int wave = quotient_up(4 * device_.multiprocessors, heads);
    const int committing = std::clamp(static_cast<int>(jobs), 1, wave);
    for (const std::string_view name : own_summaries) {
      own_kernels_.close_chunks(name, params, {committing, heads, stream});
    }
    if (params.rows <= most_rows_at_once && jobs <= most_jobs_at_once) {
      launch(rows_.append, {.x = params.kv_heads, .y = params.sequences, .early = appends_early_}, stream,
             params);
      return;
    }
    if (jobs > 0) launch(rows_.commit, {.x = committing, .y = heads}, stream, params);
    if (flushes) launch(rows_.flush, {.y = heads}, stream, params);
    const int tiles = std::clamp(quotient_up(params.rows, write_tile_rows), 1, wave);
    launch(rows_.write, {.x = tiles, .y = heads}, stream, params);
    if (!slow) return;
    launch(common().enter, {.x = heads}, stream,
           {.heads = params.heads,
            .states = params.states,
            .kv_heads = params.kv_heads,
            .page_rows = params.page_rows});
  }

  /// Sets counters of `count` layers or sequences back; choices of chunks go that were made when the
  /// text, up to the query that chose, was longer than `choices_until`.
  /// @throws DeviceError
  void set_states(LayerState* states, const HeadView* heads, std::size_t count, LayerState to,
                  std::size_t choices_until, cudaStream_t stream) const {
    const SetStateParams params{.heads = heads,
                                .states = states,
                                .count = static_cast<int>(count),
                                .kv_heads = static_cast<int>(shape_.kv_heads),
                                .state = to,
                                .choices_until = static_cast<int>(choices_until)};
    launch(common().set_state, {.x = quotient_up(params.count * params.kv_heads, set_state_threads)}, stream,
           params);
  }

  /// Moves the rows of a part of a tree's path to the front, in `count` heads. @throws DeviceError
  void accept_rows(const HeadView* heads, std::size_t count, std::size_t page_rows, const PathPart& path,
                   cudaStream_t stream) const {
    const AcceptRowsParams params{.heads = heads,
                                  .head_dim = static_cast<int>(shape_.head_dim),
                                  .page_rows = static_cast<int>(page_rows),
                                  .path = path};
    launch(common().accept_rows, {.x = static_cast<int>(count)}, stream, params);
  }

  /// Lets those of `count` heads of one sequence that select choose their chunks by the last of `queries` queries.
  /// `call_rows`: the number of tokens up to that query, itself included, less the number that the device counts;
  /// negative if the device counts later tokens already.
  /// @throws DeviceError
  void refresh(const HeadView* heads, const LayerState* states, std::size_t count, const Tensor& q,
               int queries, int call_rows, std::size_t page_rows, cudaStream_t stream,
               std::span<const std::string_view> own_summaries = {}) const {
    const int kv_heads = static_cast<int>(count);
    const ScoreParams scoring{.heads = heads,
                              .states = states,
                              .kv_heads = kv_heads,
                              .group = static_cast<int>(shape_.queries_per_kv()),
                              .page_rows = static_cast<int>(page_rows),
                              .queries = queries,
                              .q = q};
    const int blocks = quotient_up(4 * device_.multiprocessors, kv_heads);
    launch(rows_.score, {.x = blocks, .y = kv_heads}, stream, scoring);
    for (const std::string_view name : own_summaries) {
      own_kernels_.score_chunks(name, scoring, {blocks, kv_heads, stream});
    }
    launch(common().refresh, {.x = kv_heads}, stream,
           {.heads = heads, .states = states, .kv_heads = kv_heads, .call_rows = call_rows});
  }

  /// Blocks that share the rows of a head that is observed, and so its places for partial states.
  [[nodiscard]] int observe_blocks() const {
    return quotient_up(4 * device_.multiprocessors, static_cast<int>(shape_.kv_heads));
  }
  /// Scores the rows of heads that are compressed by the attention of their latest queries.
  /// @throws DeviceError
  void score_votes(const VotesParams& params, bool packs, cudaStream_t stream) const {
    observe(params.observed, packs, stream);
    launch_observing(observing(packs).votes, params.observed, params, stream);
  }
  /// The same by their keys, of the heads whose scorer `params` names. @throws DeviceError
  void score_keys(const KeyScoresParams& params, cudaStream_t stream) const {
    own_kernels_.score_keys(params, {observe_blocks(), static_cast<int>(shape_.kv_heads), stream});
  }
  /// Adds up what `queries` queries pay each row, so many at a time as there is scratch memory for; the
  /// first of them comes `queries` tokens before the end. @throws DeviceError
  void add_columns(ColumnSumsParams params, int queries, bool packs, cudaStream_t stream) const {
    ObserveParams& observed = params.observed;
    for (int done = 0; done < queries; done += most_observing) {
      observed.ahead = queries - done;
      observed.queries = std::min(most_observing, queries - done);
      observe(observed, packs, stream);
      launch_observing(observing(packs).column_sums, observed, params, stream);
    }
  }

  /// Scratch memory of a launch that observes at most `queries` queries. The tickets must be 0 before the
  /// first launch, and are 0 after each.
  struct ObserveMemory {
    std::uint32_t* tickets = nullptr;
    PartialState* partial = nullptr;
    float* log_sum_exp = nullptr;
  };
  [[nodiscard]] ObserveMemory observe_memory(ArrayCarver& carver, int queries) const {
    const auto heads = static_cast<std::size_t>(shape_.kv_heads);
    const auto columns =
        static_cast<std::size_t>(observe_columns(static_cast<int>(shape_.queries_per_kv()), queries));
    return {carver.take<std::uint32_t>(heads),
            carver.take<PartialState>(heads * static_cast<std::size_t>(observe_blocks()) * columns),
            carver.take<float>(heads * columns)};
  }
  /// Obtains what `add_columns` needs for the calls of heads that add up attention, once for all layers
  /// and caches; its place never changes, so that graphs stay valid. @throws std::bad_alloc, DeviceError
  void prepare_accumulation(cudaStream_t stream) {
    if (accumulation_ != nullptr) return;
    enter(stream);
    DeviceBuffer memory = allocate(memory_, observe_bytes(), stream);
    check(cudaMemsetAsync(memory.get(), 0, shape_.kv_heads * sizeof(std::uint32_t), stream),
          "cudaMemsetAsync");
    accumulation_ = std::move(memory);
  }
  [[nodiscard]] ObserveMemory accumulation_memory() const {
    ArrayCarver carver{accumulation_.get()};
    return observe_memory(carver, most_observing);
  }

  /// The rows that survive. @throws DeviceError
  void keep(const KeepParams& params, cudaStream_t stream) const {
    launch(common().keep, {.x = static_cast<int>(shape_.kv_heads)}, stream, params);
  }
  /// Ranks the rows of a layer's heads that share their budget. @throws DeviceError
  void rank_shared(const SharedBudgetParams& params, cudaStream_t stream) const {
    launch(common().rank_shared, {.x = params.count}, stream, params);
  }
  /// The rows that survive in all heads that share it. @throws DeviceError
  void choose_shared(const SharedBudgetParams& params, cudaStream_t stream) const {
    launch(common().choose_shared, {}, stream, params);
  }
  /// The rows of heads that choose again how many they have won. @throws DeviceError
  void share_weighed(const SharedBudgetParams& params, cudaStream_t stream) const {
    launch(common().share_weighed, {.x = params.count}, stream, params);
  }
  /// Moves the survivors; `longest`: the most rows that survive in a head. @throws DeviceError
  void compact(const CompactParams& params, std::size_t longest, cudaStream_t stream) const {
    const int tiles = std::max(1, compact_tiles(static_cast<int>(longest), 0));
    launch(rows_.compact, {.x = tiles, .y = params.kv_heads}, stream, params);
  }

  /// Bounds of the rows of heads with keys in halves (kernels/bound.cuh), for calls of at most decode_most_columns.
  /// @throws DeviceError
  void bound(const BoundParams& params, cudaStream_t stream) const {
    const Kernel<BoundParams>& kernel = bounds_[params.columns() <= 8 ? 0 : 1];
    if (kernel.code == nullptr) return;  // no head of this head_dim has keys in halves
    launch(kernel, {.x = params.blocks, .y = params.call.kv_heads}, stream, params);
  }
  /// Chooses units by them, at first and again (kernels/choose_units.cuh). @throws DeviceError
  void choose_units(const BoundParams& params, bool again, cudaStream_t stream) const {
    launch(again ? common().choose_units_again : common().choose_units, {.x = params.call.kv_heads}, stream,
           params);
  }
  /// For score_launches.hpp.
  [[nodiscard]] const detail::RowKernels& row_kernels() const { return rows_; }

 private:
  // Beyond these a call is worth the whole device and two launches.
  static constexpr int most_rows_at_once = 64;
  static constexpr std::size_t most_jobs_at_once = 4;

  static const ModelShape& checked(const ModelShape& shape) {
    shape.validate();
    check_served(shape);
    require(shape.queries_per_kv() <= 16, "gpu::Engine: ", shape.queries_per_kv(),
            " query heads share a KV head, the kernels serve 1 to 16");
    return shape;
  }

  [[nodiscard]] std::size_t own_bytes() const {
    const auto& [tickets, states, values] = attention_.counts();
    return tickets * sizeof(std::uint32_t) + states * sizeof(PartialState) + values * sizeof(float);
  }
  [[nodiscard]] std::uint32_t* tickets() const { return reinterpret_cast<std::uint32_t*>(workspace_.get()); }
  [[nodiscard]] Workspace workspace() const {
    auto* states = reinterpret_cast<PartialState*>(tickets() + attention_.counts().tickets);
    return {.values = reinterpret_cast<float*>(states + attention_.counts().states),
            .states = states,
            .tickets = tickets()};
  }

  [[nodiscard]] static const detail::CommonKernels& common() { return detail::common_kernels<>(); }
  [[nodiscard]] const detail::ObserveKernels& observing(bool packs) const {
    return observing_[packs && observing_[1].votes.code != nullptr ? 1 : 0];
  }
  // All that a cache of this head_dim can launch, ahead of graphs, which must find them loaded.
  template <int D>
  void take_kernels() {
    rows_ = detail::row_kernels<E, D>();
    observing_[0] = detail::observe_kernels<E, D, false>();
    if constexpr (can_quantize<D>) {
      observing_[1] = detail::observe_kernels<E, D, true>();
      bounds_ = {detail::bound_kernel_of<E, D, 1>(), detail::bound_kernel_of<E, D, 2>()};
    }
    observe_shared_bytes_ = observe_shared_bytes<D>;
    const auto prepare = [](const auto& kernel) {
      if (kernel.code != nullptr) load_kernel(kernel);
    };
    rows_.visit(prepare);
    common().visit(prepare);
    for (const detail::ObserveKernels& kernels : observing_) {
      prepare(kernels.log_sum_exps);
      prepare(kernels.votes);
      prepare(kernels.column_sums);
    }
    for (const Kernel<BoundParams>& kernel : bounds_) prepare(kernel);
    appends_early_ = load_kernel(rows_.append) >= first_that_waits;
  }

  // The first pass over the keys.
  void observe(const ObserveParams& params, bool packs, cudaStream_t stream) const {
    launch_observing(observing(packs).log_sum_exps, params, params, stream);
  }
  template <class Params>
  void launch_observing(Kernel<Params> kernel, const ObserveParams& observed, const Params& params,
                        cudaStream_t stream) const {
    kernel.shared_bytes = observe_shared_bytes_(observed.group, observed.queries);
    launch(kernel, {.x = observe_blocks(), .y = observed.kv_heads}, stream, params);
  }
  [[nodiscard]] std::size_t observe_bytes() const {
    ArrayCarver counted;
    static_cast<void>(observe_memory(counted, most_observing));
    return counted.bytes();
  }

  ModelShape shape_;
  Device device_;
  MemoryResource* memory_;
  AttendLaunches<E> attention_;
  mutable StreamOrder order_;  // of all work that uses what follows
  DeviceBuffer workspace_;     // tickets, then states, then values
  DeviceBuffer accumulation_;  // tickets, partial states and log-sum-exps, or null
  std::unique_ptr<Staging> staging_;
  OwnKernels<E> own_kernels_;
  detail::RowKernels rows_;
  std::array<detail::ObserveKernels, 2> observing_;  // of exact rows and all
  std::array<Kernel<BoundParams>, 2> bounds_;        // for 8 columns and 16
  std::size_t (*observe_shared_bytes_)(int group, int queries) = nullptr;
  bool appends_early_ = false;
};

}  // namespace kvpolicy::gpu
