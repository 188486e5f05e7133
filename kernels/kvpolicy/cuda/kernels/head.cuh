// SPDX-License-Identifier: Apache-2.0
//
// What kernels know about a KV head: where its rows are, and which of them a query reads.
// Everything that changes from token to token follows from two counters on the device, so a
// captured step can be replayed while the text grows.
//
// Rows of a head are numbered in the order in which they were added. Row r is token r + evicted;
// the first `sinks` rows are never dropped. The other rows are in exact pages (in order or as a
// ring) or, in whole blocks of quantized_together, in packed pages. A tentative row is already in its final
// slot; a rollback only decreases the counter.
//
// A row whose block is not full is read from its exact slot, but its key or value may be quantised
// already: by KIVI's flush, or because it came from a host cache. Then its codes are in the packed page,
// and the exact slot has the number that they stand for.
#pragma once

#include <climits>
#include <cstdint>
#include <string_view>

#include <kvpolicy/core/choices.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/progress.hpp>
#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/tree.cuh>

namespace kvpolicy::gpu {

inline constexpr int unlimited = INT_MAX;

using kvpolicy::Votes;
using kvpolicy::with_vote;
using kvpolicy::detail::larger;
using kvpolicy::detail::smaller;

/// The length of one sequence's text in one layer.
using LayerState = TextProgress<int>;

/// The chunks that a selecting head reads, and its earlier selections, to which a rollback returns.
/// They form a ring of `slots` selections; `chunks` is [slots, budget_chunks], each ascending.
struct Selections {
  int latest = 0;
  int valid = 0;  ///< selections that are still valid, the latest included
  int slots = 0;
  int* tokens = nullptr;  ///< [slots]: length of the text, with the selecting query
  int* ends = nullptr;    ///< [slots]: rows that could be selected; later rows are read too
  int* counts = nullptr;  ///< [slots]: number of selected chunks
  int* chunks = nullptr;

  KVPOLICY_HOST_DEVICE ChoiceRing<int> ring() const { return {latest, valid, slots}; }
};

/// How kernels tell one summary from another: FNV-1a of its name, and never 0.
[[nodiscard]] constexpr std::uint64_t summary_tag(std::string_view name) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211ULL;
  return hash | 1U;
}

struct SlowRows;  // slow_rows.cuh

/// One KV head of one sequence, in device memory. It has only numbers and addresses: its rule
/// (core/head_rule.hpp) as far as kernels need it, and where its rows are.
struct HeadView {
  // Which rows live.
  int sinks = 0;
  int recent = 0;                   ///< Latest rows that a query reads besides the sinks; 0: all.
  bool prefill_chunk_mask = false;  ///< `recent` counts from the call's first query, not from each query.
  int evicted = 0;                  ///< Tokens whose rows were dropped by compression.
  // Exact rows: sinks begin at slot 0, the others at slot `exact_origin`, a multiple of page_rows.
  std::byte* const* exact_pages = nullptr;
  int exact_origin = 0;
  int exact_ring = 0;  ///< Slots from the origin on, in whole pages; 0: not a ring.
  // How exact rows lie in a page, in bytes, multiples of 16. An engine's pages are not contiguous.
  int exact_row_stride = 0;           ///< from a row to the next one
  long long exact_values_offset = 0;  ///< from a row's key to its value
  // Quantised rows, which begin at slot 0.
  std::byte* const* packed_pages = nullptr;
  int packed_ring = 0;
  Encoding key_encoding = Encoding::float32;    ///< float32: nothing is quantised.
  Encoding value_encoding = Encoding::float32;  ///< quantised if keys are
  bool key_per_channel = false;
  bool key_hadamard = false;    ///< Keys were rotated before they were quantised (hadamard.cuh).
  bool value_hadamard = false;  ///< The same for values.
  int key_group = 0;
  int value_group = 0;
  int residual = unlimited;  ///< Latest rows that stay exact, at least.
  bool kivi_flush = false;   ///< All keys are quantised whenever their number is a multiple of `residual`.
  int coded_keys = 0;        ///< Keys of earlier rows had codes when the head came from the host.
  int coded_values = 0;      ///< The same for values.
  bool upper_half =
      false;  ///< Of packed codes in halves the upper ones are read; set for a call, in its copy.
  // Rotation for sinks that are read as if they came right before the window.
  const float* inverse_frequencies = nullptr;  ///< [head_dim / 2] or null
  int rotation_limit = 0;                      ///< latest position that a query is rotated to
  // Retrieval chunks.
  int chunk_rows = 0;  ///< 0: the head reads all its rows.
  int budget_chunks = 0;
  int chunk_origin = 0;       ///< row where chunk 0 begins
  bool min_max = false;       ///< summaries are min and max keys, not means
  Votes votes = Votes::mean;  ///< What `sums` are.
  bool waits_for_scoring =
      false;  ///< Only the calls of scoring passes count in them (policy/kvzip_scorer.hpp).
  /// The tag of a summary of the caller's own, which has kernels of its own (own_summary.cuh); else 0.
  std::uint64_t own_summary = 0;
  std::byte* const* summary_pages = nullptr;  ///< page_rows summaries each, [vectors, rows, dim]
  Selections* selections = nullptr;
  float* scores = nullptr;   ///< scores of full chunks, from score.cuh to select.cuh
  SlowRows* slow = nullptr;  ///< set if the head's rows are in slow memory
  /// Each row's attention so far, a mean over the query heads or, with Votes::largest, the most that one query
  /// paid it; set if the head ranks its rows by it. Negative for a row that no scoring pass has seen, where the head
  /// waits for one.
  double* sums = nullptr;

  KVPOLICY_HOST_DEVICE bool is_packed() const { return key_encoding >= Encoding::uint8; }
  /// How the codes of a head that is packed are read.
  KVPOLICY_HOST_DEVICE Sides widths() const { return widths(upper_half); }
  KVPOLICY_HOST_DEVICE Sides widths(bool upper) const {
    const auto of = [&](Encoding encoding) {
      const int width = code_width(encoding);
      return upper && width == both_halves ? upper_halves : width;
    };
    return {of(key_encoding), of(value_encoding)};
  }
  /// How its quantised rows lie in a page.
  KVPOLICY_HOST_DEVICE PackedLayout packed_layout(int head_dim, int page_rows) const {
    return {widths(), head_dim, page_rows, key_per_channel, key_group, value_group};
  }
  KVPOLICY_HOST_DEVICE WindowRule<int> window_rule() const { return {sinks, recent, prefill_chunk_mask}; }
  KVPOLICY_HOST_DEVICE ChunkRule<int> chunk_rule() const { return {chunk_rows, budget_chunks}; }

  /// The slot of row `row` among the exact slots.
  KVPOLICY_HOST_DEVICE int exact_slot(int row) const {
    if (row < sinks) return row;
    const int at = row - sinks;
    return exact_origin + (exact_ring > 0 ? at % exact_ring : at);
  }
  /// The key or value at a slot, in the page that has the slot.
  KVPOLICY_HOST_DEVICE std::byte* exact_row(std::byte* page, int slot_in_page, bool key) const {
    return page + slot_in_page * exact_row_stride + (key ? 0 : exact_values_offset);
  }
  /// Exact pages are the cache's own: all keys of a page lie before all its values, with no gap.
  void set_contiguous_rows(int head_dim, int page_rows) {
    exact_row_stride = head_dim * 2;
    exact_values_offset = static_cast<long long>(page_rows) * exact_row_stride;
  }
  KVPOLICY_HOST_DEVICE int packed_slot(int row) const {
    const int at = row - sinks;
    return packed_ring > 0 ? at % packed_ring : at;
  }
  /// The first row that is not packed once `committed` tokens are.
  KVPOLICY_HOST_DEVICE int packed_end(int committed) const {
    if (!is_packed()) return sinks;
    const ResidualRule<int> rule{residual, quantized_together};
    return sinks + rule.quantized(committed - evicted - sinks);
  }
  /// The first row whose key has no code once `committed` tokens are; not before `packed_end`.
  KVPOLICY_HOST_DEVICE int keys_end(int committed) const {
    const int end = larger(packed_end(committed), coded_keys);
    if (!kivi_flush) return end;
    const ResidualRule<int> rule{residual, 1, true};
    return larger(end, sinks + rule.quantized(larger(committed - evicted - sinks, 0)));
  }
  KVPOLICY_HOST_DEVICE int values_end(int committed) const {
    return larger(packed_end(committed), coded_values);
  }
  /// Chunks whose rows are all committed.
  KVPOLICY_HOST_DEVICE int closed_chunks(int committed) const {
    return chunk_rule().closed(committed - evicted);
  }
};

/// Consecutive rows of a head that a call reads, or, if `chunks` is set, the rows of those chunks.
/// A row at text position p is visible to a query at t if p <= t and p > t - window.
struct DeviceSegment {
  enum class Source : std::uint8_t { exact, packed, call };
  Source source = Source::exact;
  bool rotated = false;  ///< the query is read at min(its position, HeadView::rotation_limit)
  int rows = 0;
  int first = 0;  ///< row number, with `chunks` of chunk 0; for the call's own rows, their index in the call
  int position = 0;  ///< text position of row `first` (with `chunks`: of row 0 of the head)
  int window = unlimited;
  const int* chunks = nullptr;
  int chunk_rows = 0;
  // Rows of tree nodes: a query sees those that CallTree says and that are inside its window.
  int node = -1;        ///< node of row `first`; -1: rows of the text. `position` is that of depth 0
  int depth_begin = 0;  ///< nodes of other depths are in another segment or in none
  int depth_end = unlimited;

  /// Row number (or index, see `first`) of the segment's i-th row.
  KVPOLICY_HOST_DEVICE int row(int i) const {
    return first + (chunks == nullptr ? i : chunks[i / chunk_rows] * chunk_rows + i % chunk_rows);
  }
  /// Text position of the segment's i-th row.
  KVPOLICY_HOST_DEVICE int position_of(int i) const {
    return chunks == nullptr ? position + i : position + row(i);
  }
};

/// What a call requests from every head.
struct Request {
  int queries = 1;
  bool own_rows = true;     ///< the call brings its rows; else they are appended already
  bool selected = false;    ///< Read::selected
  bool upper_half = false;  ///< Read::upper_half
  CallTree tree = {};

  /// Nodes of earlier calls.
  KVPOLICY_HOST_DEVICE int older_nodes() const { return tree.nodes > 0 ? tree.nodes - queries : 0; }
  /// A query's position minus DeviceSegmentList::first_position.
  KVPOLICY_HOST_DEVICE int place_of(int query) const {
    return tree.nodes > 0 ? tree.depths[older_nodes() + query] : query;
  }
  /// The last query's position minus DeviceSegmentList::first_position.
  KVPOLICY_HOST_DEVICE int span() const { return tree.nodes > 0 ? tree.highest : queries - 1; }
};

/// One query of a call with a tree.
struct TreeQuery {
  const CallTree& tree;
  int depth;
  const std::uint32_t* seen;

  KVPOLICY_HOST_DEVICE TreeQuery(const Request& request, int query)
      : tree{request.tree},
        depth{tree.depths[request.older_nodes() + query]},
        seen{tree.seen + query * tree.words} {}

  /// Whether it sees the segment's i-th row; i may be outside the segment. Depth 0 is at `root`.
  KVPOLICY_HOST_DEVICE bool sees(const DeviceSegment& segment, int root, int i) const {
    if (i < 0 || i >= segment.rows) return false;
    int offset = i;  // distance from the segment's position
    if (segment.node >= 0) {
      const std::uint32_t word = seen[CallTree::word_of(segment.node) + i / 32];
      if ((word >> i % 32 & 1U) == 0) return false;
      offset = tree.depths[segment.node + i];
      if (offset < segment.depth_begin || offset >= segment.depth_end) return false;
    }
    return segment.window == unlimited || segment.position + offset > root + depth - segment.window;
  }
};

inline constexpr int most_segments = 7;

struct DeviceSegmentList {
  int count = 0;
  int first_position = 0;  ///< position of the first query; with a tree, of depth 0
  DeviceSegment segment[most_segments];

  KVPOLICY_HOST_DEVICE void add(const DeviceSegment& next) {
    if (next.rows > 0) segment[count++] = next;
  }
};

KVPOLICY_HOST_DEVICE constexpr int quotient_up(int a, int b) { return (a + b - 1) / b; }

/// How many of `count` ascending chunks begin before row `end`.
KVPOLICY_HOST_DEVICE int chunks_before(const int* chunks, int count, int chunk_rows, int end) {
  int before = 0;
  KVPOLICY_NO_UNROLL
  for (int step = 1 << 30; step > 0; step /= 2) {
    if (before + step <= count && chunks[before + step - 1] * chunk_rows < end) before += step;
  }
  return before;
}

/// Adds the nodes of a tree: first the cached ones, then the call's. Their rows begin at `row`, and
/// node 0 is at text position `root`. The window's oldest row is `oldest`. Some nodes may be sinks
/// by their position; these get further segments over the same rows.
template <class List>
KVPOLICY_HOST_DEVICE void list_nodes(const HeadView& head, const Request& request, int root, int row,
                                     int oldest, int query_window, List& list) {
  const int older = request.older_nodes();
  KVPOLICY_NO_UNROLL
  for (int own = 0; own < 2; ++own) {
    DeviceSegment nodes{
        .rows = own == 0 ? older : request.queries, .position = root, .node = own == 0 ? 0 : older};
    if (own == 1 && request.own_rows) {
      nodes.source = DeviceSegment::Source::call;
    } else {
      nodes.first = row + nodes.node;
    }
    if (head.sinks > root) {
      DeviceSegment sinks = nodes;
      sinks.rotated = head.inverse_frequencies != nullptr;
      sinks.depth_end = head.sinks - root;
      list.add(sinks);
    }
    nodes.window = query_window;
    nodes.depth_begin = larger(oldest - root, 0);
    list.add(nodes);
  }
}

/// Adds the segments of a head that a call reads, in the order of the text, to a list: a
/// DeviceSegmentList or any other type with `first_position` and `add`.
template <class List>
KVPOLICY_HOST_DEVICE void list_segments(const HeadView& head, const LayerState& state, const Request& request,
                                        List& list) {
  using Source = DeviceSegment::Source;
  // With a tree, the cached nodes come between the text and the call's rows.
  const bool tree = request.tree.nodes > 0;
  const int first =
      (request.own_rows ? state.tokens : state.tokens - request.queries) - request.older_nodes();
  list.first_position = first;
  const int stored = (tree ? first : state.tokens) - head.evicted;
  const WindowRule<int> window = head.window_rule();
  const int query_window = window.query_window(unlimited);
  const bool rotated = head.inverse_frequencies != nullptr;
  list.add({.rotated = rotated, .rows = smaller(head.sinks, stored)});

  int from = window.first_read(first + request.tree.lowest);
  const int oldest = from + head.evicted;
  const int packed_end = smaller(head.packed_end(state.committed), stored);
  if (request.selected && head.chunk_rows > 0 && head.selections->valid > 0) {
    const Selections& choice = *head.selections;
    const int* chunks = choice.chunks + choice.latest * head.budget_chunks;
    const int count = choice.counts[choice.latest];
    const int rows = head.chunk_rows;
    // Chunks in packed pages; no chunk is in both kinds of pages.
    const int packed = chunks_before(chunks, count, rows, packed_end - head.chunk_origin);
    KVPOLICY_NO_UNROLL
    for (int exact = 0; exact < 2; ++exact) {
      list.add({.source = exact == 0 ? Source::packed : Source::exact,
                .rows = (exact == 0 ? packed : count - packed) * rows,
                .first = head.chunk_origin,
                .position = head.evicted,
                .chunks = chunks + (exact == 0 ? 0 : packed),
                .chunk_rows = rows});
    }
    from = choice.ends[choice.latest];
  }
  KVPOLICY_NO_UNROLL
  for (int exact = 0; exact < 2; ++exact) {  // one piece of code for both, which every kernel has
    list.add({.source = exact == 0 ? Source::packed : Source::exact,
              .rows = (exact == 0 ? packed_end : stored) - from,
              .first = from,
              .position = from + head.evicted,
              .window = query_window});
    from = larger(from, packed_end);
  }
  if (tree) {
    list_nodes(head, request, first, stored, oldest, query_window, list);
  } else if (request.own_rows) {
    const int sinks = window.sinks_among({first, first + request.queries}).rows();
    KVPOLICY_NO_UNROLL
    for (int others = 0; others < 2; ++others) {
      const int own = others == 0 ? 0 : sinks;
      list.add({.source = Source::call,
                .rotated = others == 0 && rotated,
                .rows = (others == 0 ? sinks : request.queries) - own,
                .first = own,
                .position = first + own,
                .window = others == 0 ? unlimited : query_window});
    }
  }
}
KVPOLICY_HOST_DEVICE DeviceSegmentList segments_of(const HeadView& head, const LayerState& state,
                                                   const Request& request) {
  DeviceSegmentList list;
  list_segments(head, state, request, list);
  return list;
}

/// A caller's tensor of one layer, [sequences, tokens, heads, head_dim]; strides in elements.
struct Tensor {
  std::byte* data = nullptr;
  long long sequence_stride = 0;
  long long token_stride = 0;
  long long head_stride = 0;

  /// Address of a row of 16-bit numbers.
  KVPOLICY_HOST_DEVICE std::uint16_t* row(int sequence, int token, int head) const {
    return reinterpret_cast<std::uint16_t*>(data) + sequence * sequence_stride + token * token_stride +
           head * head_stride;
  }
};

}  // namespace kvpolicy::gpu
