// SPDX-License-Identifier: Apache-2.0
//
// One layer of a device cache: its heads, and what the host knows of how far its text has come. The
// counters here are the device's own, foreseen: nothing is ever read back.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/pending_tree.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/choices.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/progress.hpp>
#include <kvpolicy/cuda/head_store.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/query_ring.hpp>
#include <kvpolicy/cuda/staging.hpp>

namespace kvpolicy::gpu {

/// The choices of chunks that a head remembers, as the device does (select.cuh).
struct HeadChoices {
  ChoiceRing<std::size_t> ring;
  std::vector<std::size_t> tokens;     ///< [slots]: of the text, with the query that chose
  std::vector<std::size_t> committed;  ///< [slots]

  void add(std::size_t at, std::size_t committed_then, std::size_t slots) {
    ring.slots = slots;
    tokens.resize(slots);
    committed.resize(slots);
    ring = ring.after_choice(at, tokens.data());
    tokens[ring.latest] = at;
    committed[ring.latest] = committed_then;
  }
};

class Layer : public TextProgress<std::size_t> {
 public:
  struct Shape {
    ModelShape model;
    CacheOptions options;
  };

  Layer(const Shape& shape, std::size_t observed_queries, cudaStream_t stream)
      : queries{observed_queries,     shape.options.tail_rows(), shape.model.q_heads,
                shape.model.head_dim, shape.options.memory,      stream},
        q_heads_{shape.model.q_heads},
        memory_{shape.options.memory} {
    heads.reserve(shape.model.kv_heads);
    if (queries.is_kept()) sink_logits_ = allocate(memory_, sink_bytes(), stream);
  }

  std::vector<HeadStore> heads;
  QueryRing queries;
  std::vector<std::string_view> own_summaries = {};  ///< of heads whose summaries are of the caller's own
  std::size_t reached = 0;                           ///< the most tokens that it ever had
  std::size_t reserved = 0;
  PendingTree tree = {};            ///< what the latest rows are, where they are guesses that branch
  std::optional<float> scale = {};  ///< of the latest call, for a compression
  float softcap = 0.0F;
  const ConstTensor* outputs = nullptr;  ///< the layer's output projection, on the device, where it is known

  /// Choices of chunks that a head remembers: one for each length that a rollback can return to, one
  /// for the committed text, one that is being made. After longer rollbacks it chooses again.
  [[nodiscard]] static std::size_t selection_slots(std::size_t max_rollback) {
    return std::min<std::size_t>(max_rollback, 254) + 2;
  }

  [[nodiscard]] LayerState state() const { return {static_cast<int>(tokens), static_cast<int>(committed)}; }
  void advance(std::size_t rows, std::size_t commit_rows, std::size_t max_rollback) {
    TextProgress::operator=(after(rows, commit_rows, max_rollback));
    reached = std::max(reached, tokens);
  }
  /// Tokens of the text, on which a pending tree hangs.
  [[nodiscard]] std::size_t text() const { return tokens - tree.size(); }
  void truncate(std::size_t to) {
    tree.truncate(to - std::min(to, text()));
    tokens = to;
    queries.truncate(to);
    undo_choices(to);
  }
  /// The nodes of `path` become rows of the text; all other nodes of the pending tree are dropped. Choices that
  /// nodes of the path made stay if the node keeps its row number, because they are the text's own queries then.
  void accept(std::span<const std::size_t> path) {
    const std::size_t root = text();
    queries.note_accepted(root, path);
    tree.truncate(0);
    tokens = root + path.size();
    undo_choices(root + unmoved_nodes(path));
  }

  /// Whether any head has quantised rows, now or once it is compressed.
  [[nodiscard]] bool packs() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return h.settings().is_quantized(); });
  }
  /// Whether any head has keys in halves, which bound their logits.
  [[nodiscard]] bool has_halves() const {
    return std::ranges::any_of(heads,
                               [](const HeadStore& h) { return is_in_halves(h.settings().key_encoding); });
  }
  /// Whether any head has KIVI's flush.
  [[nodiscard]] bool flushes() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return h.settings().kivi_flush; });
  }
  /// Most rows that a call reads of one head.
  [[nodiscard]] std::size_t longest_read(const Request& request) const {
    std::size_t longest = 0;
    for (const HeadStore& head : heads) {
      const HeadRule& settings = head.settings();
      std::size_t rows = settings.window_rule().kept_rows(tokens - head.evicted());
      if (request.selected && settings.chunk > 0) rows = std::min(rows, settings.chosen_rows);
      longest = std::max(longest, rows);
    }
    return longest + (request.own_rows ? static_cast<std::size_t>(request.queries) : 0);
  }
  /// About how many blocks are quantised and chunks closed by a call of `rows` rows, in a head.
  [[nodiscard]] std::size_t most_commit_jobs(std::size_t rows) const {
    const std::size_t more = rows + tokens - committed;
    std::size_t most = 0;
    for (const HeadStore& head : heads) {
      std::size_t jobs = head.settings().is_quantized() ? more / quantized_together + 1 : 0;
      if (head.settings().chunk > 0) jobs += more / head.settings().chunk + 1;
      most = std::max(most, jobs);
    }
    return most;
  }
  /// visit(first head, count, whether their rows are quantised) for each run of neighbouring heads
  /// with equal settings.
  template <class Visit>
  void for_each_kind(Visit visit) const {
    for (std::size_t first = 0; first < heads.size();) {
      std::size_t last = first + 1;
      while (last < heads.size() && heads[last].settings() == heads[first].settings()) ++last;
      visit(first, last - first, heads[first].settings().is_quantized());
      first = last;
    }
  }

  // ---- rows in slow memory

  [[nodiscard]] bool is_slow() const { return std::ranges::any_of(heads, &HeadStore::is_slow); }
  /// Whether a read needs rows of a head that must be staged.
  [[nodiscard]] bool stages(bool selected) const {
    return std::ranges::any_of(heads, [&](const HeadStore& head) { return is_staged(head, selected); });
  }
  /// Whether a selected read finds rows of a head where they were gathered.
  [[nodiscard]] bool gathers() const {
    return std::ranges::any_of(
        heads, [](const HeadStore& head) { return head.is_slow() && head.settings().chunk > 0; });
  }
  [[nodiscard]] LayerState furthest() const {
    return {static_cast<int>(reached), static_cast<int>(committed)};
  }
  /// What there must be room for where rows are staged, for a text of `tokens`. It grows by a quarter
  /// at least, so that a text that grows row by row seldom asks.
  [[nodiscard]] StageExtent stage_extent(std::size_t text, std::size_t max_tokens) const {
    return extent_of(staged_for(text, max_tokens));
  }
  void lay_out_staging(std::size_t text, std::size_t max_tokens) {
    const std::size_t room = staged_for(text, max_tokens);
    if (room == staged_tokens_ || !is_slow()) return;
    staged_tokens_ = room;
    stage_id_ = next_stage_id();
    StageOffset offset;
    for (HeadStore& head : heads) {
      if (!head.is_slow()) continue;
      head.set_stage_offset(offset);
      offset.pages += head.staged_pages(room);
      offset.bytes += head.staged_pages(room) * head.slow_page_bytes();
    }
  }
  /// Identifies the pages that `staged` lists: no two layers of a program have the same number, and it changes when the
  /// pages move within the staging buffer. The engine goes by it to find pages that are staged already.
  [[nodiscard]] std::uint64_t stage_id() const { return stage_id_; }
  /// The pages that a read must find staged.
  [[nodiscard]] StagedLayer staged(bool selected) const {
    StagedLayer layer{.id = stage_id_, .heads = {}};
    for (const HeadStore& head : heads) {
      if (!head.is_slow()) continue;
      layer.heads.push_back({&head.slow_pages(),
                             is_staged(head, selected) ? head.slow_only_pages(furthest()) : 0,
                             head.stage_offset().bytes});
    }
    return layer;
  }

  // ---- choosing chunks

  [[nodiscard]] bool selects() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return h.settings().chunk > 0; });
  }
  /// Whether any head must choose before a selected read.
  [[nodiscard]] bool is_stale() const {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (must_refresh(head, false)) return true;
    }
    return false;
  }
  /// visit(first head, count) for each run of neighbouring heads that must choose before a selected
  /// read.
  template <class Visit>
  void for_each_stale(bool asked, Visit visit) const {
    for (std::size_t first = 0; first < heads.size();) {
      if (!must_refresh(first, asked)) {
        ++first;
        continue;
      }
      std::size_t last = first + 1;
      while (last < heads.size() && must_refresh(last, asked)) ++last;
      visit(first, last - first);
      first = last;
    }
  }
  /// The heads [first, first + count) chose when the text, with the query that chose, had `at` tokens.
  void note_refresh(std::size_t first, std::size_t count, std::size_t at, std::size_t max_rollback) {
    choices_.resize(heads.size());
    for (std::size_t head = first; head < first + count; ++head) {
      if (heads[head].settings().chunk > 0) choices_[head].add(at, committed, selection_slots(max_rollback));
    }
  }

  /// To be called once all heads are there.
  void list_own_summaries() {
    for (const HeadStore& head : heads) {
      const HeadRule& rule = head.settings();
      if (!has_own_summary(rule) || std::ranges::count(own_summaries, rule.summary) > 0) continue;
      own_summaries.push_back(rule.summary);
    }
  }
  /// The choices of one head, to be read or filled in.
  [[nodiscard]] HeadChoices& choices(std::size_t head) {
    choices_.resize(heads.size());
    return choices_[head];
  }
  [[nodiscard]] HeadChoices choices(std::size_t head) const {
    return head < choices_.size() ? choices_[head] : HeadChoices{};
  }

  // ---- compression

  /// Rows that a head would hold if it shared its budget with none.
  [[nodiscard]] std::size_t unshared_rows(std::size_t head) const {
    return tokens - heads[head].evicted_unshared();
  }
  /// Rows that a compression leaves a head, or would if it shared its budget with none.
  [[nodiscard]] std::size_t survivors_of(std::size_t head) const {
    return heads[head].settings().budget_rule().survivors(unshared_rows(head), tokens);
  }
  /// The heads that a compression changes, of all or of those whose settings ask for it now: they have
  /// rows to drop, or exact rows that only waited. If one of the heads that share their budgets loses rows,
  /// any of them may. `in_model`: one of those does that share over the model.
  [[nodiscard]] std::vector<bool> heads_to_compress(bool only_due, bool in_model) const {
    const bool sharing_due = any_sharing([&](std::size_t head) { return !only_due || is_due(head); });
    std::vector<bool> wanted(heads.size());
    for (std::size_t head = 0; head < heads.size(); ++head) {
      wanted[head] = heads[head].settings().compresses &&
                     (ranks(head, in_model) || heads[head].is_quantization_deferred()) &&
                     (shares_in_layer(head) ? sharing_due : !only_due || is_due(head));
    }
    return wanted;
  }
  /// Whether a compression compares the rows of a head, because it loses some, or another one of those that share a
  /// budget with it: of its layer or, as `in_model` says, of the model.
  [[nodiscard]] bool ranks(std::size_t head, bool in_model) const {
    if (heads[head].settings().adaptive_in_model) return in_model;
    if (!shares_in_layer(head)) return has_rows_to_drop(head);
    return any_sharing([&](std::size_t other) { return has_rows_to_drop(other); });
  }
  /// Whether a head that shares the model's budget has rows to drop.
  [[nodiscard]] bool drops_in_model() const {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (heads[head].settings().adaptive_in_model && has_rows_to_drop(head)) return true;
    }
    return false;
  }
  /// Whether a head shares the model's budget.
  [[nodiscard]] bool shares_in_model() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return h.settings().adaptive_in_model; });
  }
  [[nodiscard]] bool is_due(std::size_t head) const {
    const HeadRule& settings = heads[head].settings();
    return knows_latest(queries, settings.observation_window, tokens) &&
           settings.budget_rule().is_due(committed - heads[head].evicted_unshared(), committed,
                                         heads[head].compressed_once());
  }
  /// Rows whose keys a compression of the `wanted` heads reads for the attention of their latest queries.
  [[nodiscard]] std::size_t observed_rows(const std::vector<bool>& wanted, bool in_model) const {
    std::size_t rows = 0;
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (!wanted[head] || heads[head].settings().observation_window == 0 || !ranks(head, in_model)) continue;
      rows += tokens - heads[head].evicted();
    }
    return rows;
  }
  /// The same of a call for the heads that add up its attention; `text`: tokens, with those of the call. `scores_rows`:
  /// the call is part of a scoring pass.
  [[nodiscard]] std::size_t accumulated_rows(std::size_t text, bool scores_rows) const {
    std::size_t rows = 0;
    for (const HeadStore& head : heads) {
      if (adds_up(head, scores_rows)) rows += text - head.evicted();
    }
    return rows;
  }
  /// Whether a head adds up the attention of a call.
  [[nodiscard]] bool adds_up(bool scores_rows) const {
    return std::ranges::any_of(heads, [&](const HeadStore& h) { return adds_up(h, scores_rows); });
  }
  /// Whether a head adds up the attention of calls, so that they cannot be taken back.
  [[nodiscard]] bool accumulates() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return gpu::accumulates(h.settings()); });
  }
  /// Whether a head waits for scoring passes.
  [[nodiscard]] bool waits_for_scoring() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return h.settings().waits_for_scoring; });
  }
  /// A call of a scoring pass has seen all rows up to here.
  void note_scored() {
    for (HeadStore& head : heads) {
      if (head.settings().waits_for_scoring) head.set_scored(tokens);
    }
  }
  /// Candidates of a head that no scoring pass has seen, though it waits for one.
  [[nodiscard]] std::size_t unscored_rows(std::size_t head) const {
    const HeadStore& store = heads[head];
    if (!store.settings().waits_for_scoring) return 0;
    const std::size_t rows = tokens - store.evicted();
    const std::size_t kept = rows - store.settings().budget_rule().candidates(rows);
    return tokens - std::min(tokens, store.scored() + kept);
  }
  [[nodiscard]] bool compresses_by_itself() const {
    return std::ranges::any_of(heads, [](const HeadStore& h) { return h.settings().compress_every > 0; });
  }
  [[nodiscard]] bool wants_compress() const {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (is_due(head)) return true;
    }
    return false;
  }
  /// `in_model`: heads that share over the model drop rows. @throws ShapeError if a head that would drop rows lacks
  /// queries to choose by.
  void check_queries(std::string_view call, bool in_model = false) const {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      kvpolicy::check_queries("gpu::KvCache", call, queries, heads[head].settings().observation_window,
                              tokens, ranks(head, in_model));
    }
  }

  /// Before a compression: whether what its heads are ranked by is known. `number`: the layer's; `in_model` as above.
  /// @throws ShapeError
  void check_ranked(std::string_view call, std::size_t number, bool in_model) const {
    check_queries(call, in_model);
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (!ranks(head, in_model)) continue;
      check_scored("gpu::KvCache", number, head, unscored_rows(head), tokens - heads[head].evicted());
    }
  }

  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept {
    for (HeadStore& head : heads) head.give_back_on(use);
    queries.give_back_on(use);
    sink_logits_.give_back_on(use);
  }

  /// Keeps how the call made its logits. The sink logits are copied: they are the caller's.
  void remember_logits(const AttendOptions& options, cudaStream_t stream) {
    scale = options.scale;
    softcap = options.softcap;
    has_sink_logits_ = !options.attention_sink_bias.empty();
    if (!queries.is_kept() || !has_sink_logits_) return;
    check(cudaMemcpyAsync(sink_logits_.get(), options.attention_sink_bias.data(), sink_bytes(),
                          cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  }
  /// The same for sink logits that are on the host.
  void take_sink_logits(const std::vector<float>& logits, cudaStream_t stream) {
    has_sink_logits_ = !logits.empty() && sink_logits_ != nullptr;
    if (!has_sink_logits_) return;
    check(cudaMemcpyAsync(sink_logits_.get(), logits.data(), sink_bytes(), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
  }
  /// The attention sink bias of the latest call, on the device; null if that call had none.
  [[nodiscard]] const float* attention_sink_bias() const {
    return has_sink_logits_ ? reinterpret_cast<const float*>(sink_logits_.get()) : nullptr;
  }

  [[nodiscard]] std::size_t overhead_bytes() const { return sink_logits_ == nullptr ? 0 : sink_bytes(); }

  /// This layer's heads hold the text of `from` now; here is the rest of what that layer knows. Heads for
  /// which `is_same(head)` is true keep their choices of chunks, others make a new one.
  template <class IsSame>
  void take_text(const Layer& from, IsSame is_same, cudaStream_t stream) {
    TextProgress::operator=(from);
    reached = from.reached;
    tree = from.tree;
    scale = from.scale;
    softcap = from.softcap;
    queries.take(from.queries, stream);
    has_sink_logits_ = from.has_sink_logits_ && from.sink_logits_ != nullptr && sink_logits_ != nullptr;
    if (has_sink_logits_) {
      check(cudaMemcpyAsync(sink_logits_.get(), from.sink_logits_.get(), sink_bytes(),
                            cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
    }
    choices_.resize(heads.size());
    for (std::size_t head = 0; head < std::min(heads.size(), from.choices_.size()); ++head) {
      if (is_same(head)) choices_[head] = from.choices_[head];
    }
  }

  /// `frequencies(settings)`: the new cache's own table for a head.
  template <class Frequencies>
  [[nodiscard]] Layer fork(DeviceWrites& writes, Frequencies frequencies) const {
    Layer other{*this, queries.fork(writes.stream())};
    for (const HeadStore& head : heads) {
      other.heads.push_back(head.fork(tokens, committed, reached, frequencies(head.settings()), writes));
    }
    other.reserved = tokens;
    if (sink_logits_ != nullptr) {
      other.sink_logits_ = allocate(memory_, sink_bytes(), writes.stream());
      if (has_sink_logits_) {
        check(cudaMemcpyAsync(other.sink_logits_.get(), sink_logits_.get(), sink_bytes(),
                              cudaMemcpyDeviceToDevice, writes.stream()),
              "cudaMemcpyAsync");
      }
    }
    return other;
  }

 private:
  // Everything but heads and sink logits.
  Layer(const Layer& other, QueryRing own_queries)
      : TextProgress{other},
        queries{std::move(own_queries)},
        own_summaries{other.own_summaries},
        reached{other.reached},
        tree{other.tree},
        scale{other.scale},
        softcap{other.softcap},
        outputs{other.outputs},
        q_heads_{other.q_heads_},
        memory_{other.memory_},
        choices_{other.choices_},
        has_sink_logits_{other.has_sink_logits_},
        staged_tokens_{other.staged_tokens_} {}

  // A selected read finds the rows of heads that select without them.
  [[nodiscard]] static bool is_staged(const HeadStore& head, bool selected) {
    return head.is_slow() && !(selected && head.settings().chunk > 0);
  }
  [[nodiscard]] std::size_t staged_for(std::size_t text, std::size_t max_tokens) const {
    if (text <= staged_tokens_) return staged_tokens_;
    const std::size_t room = staged_tokens_ + staged_tokens_ / 4;
    return std::max(text, max_tokens == 0 ? room : std::min(room, max_tokens));
  }
  [[nodiscard]] StageExtent extent_of(std::size_t text) const {
    StageExtent extent;
    for (const HeadStore& head : heads) {
      extent.pages += head.staged_pages(text);
      extent.bytes += head.staged_pages(text) * head.slow_page_bytes();
    }
    return extent;
  }
  [[nodiscard]] static std::uint64_t next_stage_id() {
    static std::atomic<std::uint64_t> latest{0};
    return ++latest;
  }

  void undo_choices(std::size_t to) {
    for (HeadChoices& own : choices_) own.ring = own.ring.after_rollback(to, own.tokens.data());
  }

  [[nodiscard]] static bool adds_up(const HeadStore& head, bool scores_rows) {
    return gpu::accumulates(head.settings()) && (scores_rows || !head.settings().waits_for_scoring);
  }
  // Heads that share over the model do not compress by themselves, and are ranked with those of other layers.
  [[nodiscard]] bool shares_in_layer(std::size_t head) const {
    const HeadRule& rule = heads[head].settings();
    return rule.adaptive_in_layer && !rule.adaptive_in_model;
  }
  template <class Predicate>
  [[nodiscard]] bool any_sharing(Predicate predicate) const {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (shares_in_layer(head) && predicate(head)) return true;
    }
    return false;
  }
  [[nodiscard]] bool has_rows_to_drop(std::size_t head) const {
    const HeadRule& settings = heads[head].settings();
    return settings.compresses && settings.budget_rule().drops_rows(unshared_rows(head), tokens);
  }
  [[nodiscard]] bool must_refresh(std::size_t head, bool asked) const {
    const HeadRule& settings = heads[head].settings();
    if (settings.chunk == 0) return false;
    if (asked || head >= choices_.size() || choices_[head].ring.valid == 0) return true;
    const HeadChoices& own = choices_[head];
    return settings.chunk_rule().is_stale(own.committed[own.ring.latest], committed);
  }
  [[nodiscard]] std::size_t sink_bytes() const { return q_heads_ * sizeof(float); }

  std::size_t q_heads_;
  MemoryResource* memory_;
  std::vector<HeadChoices> choices_;  // of each head
  DeviceBuffer sink_logits_;
  bool has_sink_logits_ = false;
  std::size_t staged_tokens_ = 0;  // that the places of staged pages are laid out for
  std::uint64_t stage_id_ = next_stage_id();
};

}  // namespace kvpolicy::gpu
