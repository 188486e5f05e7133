// SPDX-License-Identifier: Apache-2.0
//
// Random operations on a Sequence and its forks; every allocated byte is accounted for.
#pragma once

#include <string>
#include <vector>

#include "cache/sequence.hpp"
#include "support/random_tree.hpp"
#include "support/repeats.hpp"

namespace test {

inline std::vector<std::pair<std::string, HeadSpec>> all_heads() {
  return {
      {"full", {}},
      {"full, 4 bits per token", {.bits = 4, .residual = 20}},
      {"full, 8 bits per token, no residual", {.bits = 8, .key_group = 32, .value_group = 16}},
      {"full, 2 bits per channel",
       {.bits = 2, .key_group = 8, .value_group = 32, .residual = 13, .per_channel = true}},
      {"full, kivi", {.bits = 4, .key_group = 16, .residual = 32, .per_channel = true, .kivi = true}},
      {"full, kivi's flush per token", {.bits = 8, .residual = 24, .kivi = true}},
      {"full, 3 bits, sinks", {.sinks = 4, .bits = 3, .residual = 9}},
      {"full, 4 bits, rotated",
       {.sinks = 1, .bits = 4, .residual = 6, .key_hadamard = true, .value_hadamard = true}},
      {"full, 2 bits per channel, values rotated",
       {.bits = 2, .key_group = 16, .residual = 15, .per_channel = true, .value_hadamard = true}},
      {"full, keys of 5 and values of 2 bits, sinks, per channel",
       {.sinks = 5,
        .bits = 2,
        .key_bits = 5,
        .key_group = 16,
        .value_group = 32,
        .residual = 21,
        .per_channel = true}},
      {"full, keys of 8 and values of 6 bits, many sinks, kivi",
       {.sinks = 35,
        .bits = 8,
        .value_bits = 6,
        .key_group = 8,
        .residual = 24,
        .per_channel = true,
        .kivi = true}},
      {"window", {.kind = Kind::window, .sinks = 4, .recent = 37}},
      {"window, no sinks", {.kind = Kind::window, .sinks = 0, .recent = 1}},
      {"window, many sinks, chunk mask",
       {.kind = Kind::window, .sinks = 33, .recent = 16, .prefill_chunk_mask = true}},
      {"window, positions in the cache", {.kind = Kind::window, .sinks = 5, .recent = 64, .in_cache = true}},
      {"window, 8 bits", {.kind = Kind::window, .sinks = 3, .recent = 40, .bits = 8, .residual = 9}},
      {"window, keys of 3 bits, values of 5",
       {.kind = Kind::window, .sinks = 2, .recent = 51, .bits = 5, .key_bits = 3, .residual = 11}},
      {"window, smaller than the residual",
       {.kind = Kind::window,
        .sinks = 1,
        .recent = 17,
        .prefill_chunk_mask = true,
        .bits = 4,
        .residual = 50}},
      {"window, kivi's flush",
       {.kind = Kind::window,
        .sinks = 2,
        .recent = 70,
        .bits = 4,
        .value_group = 32,
        .residual = 16,
        .kivi = true}},
      {"budget", {.kind = Kind::budget, .budget = 30, .window = 8}},
      {"budget of nothing, average",
       {.kind = Kind::budget, .budget = 0, .window = 5, .kernel = 5, .average = true}},
      {"budget, compresses by itself",
       {.kind = Kind::budget, .budget = 24, .window = 3, .kernel = 1, .compress_every = 40}},
      {"budget, by itself after the first",
       {.kind = Kind::budget, .budget = 11, .window = 4, .compress_every = 9, .after_first = true}},
      {"budget, short texts whole", {.kind = Kind::budget, .budget = 9, .window = 4, .compress_from = 75}},
      {"budget, short texts whole, by itself",
       {.kind = Kind::budget, .budget = 6, .window = 2, .compress_every = 20, .compress_from = 60}},
      {"budget, short texts whole, 4 bits",
       {.kind = Kind::budget, .budget = 20, .window = 5, .compress_from = 90, .bits = 4, .residual = 3}},
      {"budget, 8 bits",
       {.kind = Kind::budget, .budget = 40, .window = 6, .kernel = 3, .bits = 8, .residual = 7}},
      {"budget, keys of 6 bits, values of 3",
       {.kind = Kind::budget,
        .budget = 33,
        .window = 5,
        .bits = 6,
        .value_bits = 3,
        .value_group = 8,
        .residual = 4,
        .key_hadamard = true}},
      {"budget, kivi's flush",
       {.kind = Kind::budget, .budget = 40, .window = 6, .bits = 4, .residual = 10, .kivi = true}},
      {"retrieval", {.kind = Kind::retrieval, .budget = 32, .chunk = 8}},
      {"retrieval, min/max",
       {.kind = Kind::retrieval, .budget = 15, .chunk = 5, .refresh_every = 1, .min_max = true}},
      {"retrieval, 4 bits",
       {.kind = Kind::retrieval, .budget = 14, .chunk = 7, .refresh_every = 20, .bits = 4, .residual = 11}},
      {"retrieval, keys of 3 bits, values of 4",
       {.kind = Kind::retrieval,
        .budget = 24,
        .chunk = 8,
        .refresh_every = 9,
        .bits = 4,
        .key_bits = 3,
        .key_group = 8,
        .residual = 5,
        .per_channel = true}},
      {"retrieval, per channel",
       {.kind = Kind::retrieval,
        .budget = 32,
        .chunk = 16,
        .bits = 8,
        .key_group = 8,
        .residual = 19,
        .per_channel = true}},
      {"retrieval, min/max, kivi",
       {.kind = Kind::retrieval,
        .budget = 16,
        .chunk = 16,
        .refresh_every = 33,
        .min_max = true,
        .bits = 4,
        .key_group = 16,
        .residual = 16,
        .per_channel = true,
        .kivi = true}},
      {"retrieval, min/max, 4 bits",
       {.kind = Kind::retrieval, .budget = 64, .chunk = 32, .min_max = true, .bits = 4, .residual = 3}},
      {"full, 4 bits per channel, both rotated, sinks",
       {.sinks = 4,
        .bits = 4,
        .key_group = 16,
        .value_group = 32,
        .residual = 19,
        .per_channel = true,
        .key_hadamard = true,
        .value_hadamard = true}},
      {"full, 3 bits per channel, both rotated, sinks",
       {.sinks = 3,
        .bits = 3,
        .key_group = 8,
        .residual = 10,
        .per_channel = true,
        .key_hadamard = true,
        .value_hadamard = true}},
      {"full, 8 bits in halves, per channel, rotated",
       {.sinks = 2,
        .bits = 8,
        .key_group = 16,
        .residual = 7,
        .per_channel = true,
        .key_hadamard = true,
        .value_hadamard = true,
        .halves = true}},
      {"full, keys of 8 bits in halves and values of 5",
       {.bits = 8, .value_bits = 5, .residual = 2, .halves = true}},
      {"full, 2 bits per channel, values rotated and normal numbers, sinks",
       {.sinks = 4,
        .bits = 2,
        .key_group = 16,
        .residual = 9,
        .per_channel = true,
        .key_hadamard = true,
        .value_hadamard = true,
        .value_codebook = oracle::Codebook::normal}},
      {"full, 4 bits of normal numbers, rotated",
       {.bits = 4,
        .residual = 12,
        .key_hadamard = true,
        .value_hadamard = true,
        .key_codebook = oracle::Codebook::normal,
        .value_codebook = oracle::Codebook::normal}},
      {"full, fp8",
       {.bits = 8,
        .residual = 0,
        .key_codebook = oracle::Codebook::fp8,
        .value_codebook = oracle::Codebook::fp8,
        .head_scale = 0.25}},
      {"full, MXFP4",
       {.bits = 4,
        .residual = 3,
        .key_codebook = oracle::Codebook::mxfp4,
        .value_codebook = oracle::Codebook::mxfp4}},
      {"full, NVFP4",
       {.bits = 4,
        .residual = 0,
        .key_codebook = oracle::Codebook::nvfp4,
        .value_codebook = oracle::Codebook::nvfp4,
        .head_scale = 0.125}},
      {"budget, values of 3 bits of normal numbers",
       {.kind = Kind::budget,
        .budget = 33,
        .window = 5,
        .bits = 4,
        .value_bits = 3,
        .value_group = 8,
        .residual = 4,
        .value_codebook = oracle::Codebook::normal}},
      {"full, keys of 3 bits per channel, rotated, no sinks",
       {.bits = 4, .key_bits = 3, .key_group = 16, .residual = 0, .per_channel = true, .key_hadamard = true}},
      {"budget, the largest votes", {.kind = Kind::budget, .budget = 30, .window = 8, .largest = true}},
      {"budget, weighed by values", {.kind = Kind::budget, .budget = 28, .window = 6, .weighed = true}},
      {"budget, by keys that differ",
       {.kind = Kind::budget, .rank = Rank::key_diff, .budget = 27, .window = 3}},
      {"budget, by queries to come",
       {.kind = Kind::budget, .rank = Rank::expected, .budget = 25, .window = 0, .draws = 9, .future = 20}},
  };
}

/// Takes `layers * kv_heads` heads that the plan's storages allow, from index `first` on, cyclically.
inline std::vector<HeadSpec> some_heads(std::size_t first, std::size_t count, bool compress_by_itself) {
  std::vector<HeadSpec> heads;
  const auto all = all_heads();
  for (std::size_t i = first; heads.size() < count; ++i) {
    const HeadSpec& spec = all[i % all.size()].second;
    if (spec.cannot_return() && !compress_by_itself) continue;
    heads.push_back(spec);
  }
  return heads;
}

/// The live bytes of the resource must be the bytes of the caches on it; a page that two caches share counts
/// once.
template <kvpolicy::Element E, class Backend>
void check_bytes(const typename Backend::Memory& memory, std::vector<Sequence<E, Backend>>& sequences) {
  std::vector<const typename Backend::Cache*> caches;
  for (auto& sequence : sequences) {
    CHECK(sequence.cache().shared_bytes() ==
          (sequences.size() == 2 ? sequences[0].cache().shared_bytes() : 0));
    caches.push_back(&sequence.cache());
  }
  CHECK(memory.live_bytes() == Backend::live_bytes(caches));
  CHECK(memory.faults() == 0);
}

template <class In, kvpolicy::Element E, class Backend>
void random_call(Random& random, Sequence<E, Backend>& sequence, std::size_t max_append) {
  Call call;
  call.tokens = one_of(random, std::vector<std::size_t>{1, 1, 1, 1, 2, 3, 5, 7, 17, 31});
  if (below(random, 12) == 0) call.tokens = one_of(random, std::vector<std::size_t>{63, 64, 65, 101, 150});
  call.layout =
      one_of(random, std::vector<Layout>{Layout::contiguous, Backend::odd_layout, Layout::heads_first});
  call.apart = below(random, 4) == 0;
  if (call.apart) call.tokens = std::min(call.tokens, max_append);
  call.read = below(random, 2) == 0 ? Read::selected : Read::all;
  call.refresh_selection = below(random, 4) == 0;
  sequence.template run<In>(random, call);
}

template <class In, kvpolicy::Element E, class Backend>
void grow_random_tree(Random& random, Sequence<E, Backend>& sequence, std::size_t max_rollback,
                      std::size_t max_append) {
  const std::size_t nodes =
      below(random, 3) == 0 ? max_rollback : 1 + below(random, std::min<std::size_t>(max_rollback, 24));
  const kvpolicy::TokenTree tree = random_tree(random, nodes);
  for (std::size_t done = 0; done < nodes;) {
    if (done > 0 && below(random, 8) == 0) break;
    if (done > 0 && below(random, 12) == 0) {  // and a part of it once more
      done -= below(random, done);
      sequence.truncate(sequence.tokens() + done);
    }
    Call call;
    call.tokens =
        below(random, 3) == 0 ? nodes - done : 1 + below(random, std::min<std::size_t>(nodes - done, 9));
    call.apart = below(random, 2) == 0;
    if (call.apart) call.tokens = std::min(call.tokens, max_append);
    call.read = below(random, 2) == 0 ? Read::selected : Read::all;
    done += call.tokens;
    const kvpolicy::TokenTree part = tree.first(done);
    call.tree = &part;
    sequence.template run<In>(random, call);
    if (below(random, 6) == 0) {
      auto other = sequence.fork();
      other.accept(random_path(random, part));
      other.template run<In>(random, {.tokens = 1 + below(random, 3)});
    }
  }
  const std::size_t held = sequence.pending_nodes();
  if (below(random, 4) == 0) {
    sequence.truncate(sequence.tokens() - below(random, sequence.tokens() - sequence.commit_point() + 1));
  } else {
    sequence.accept(random_path(random, tree.first(held)));
  }
}

/// Grows a tree in one call or several, and accepts a path of it or drops it. Returns false for a cache
/// without trees.
template <class In, kvpolicy::Element E, class Backend>
bool random_tree_calls(Random& random, Sequence<E, Backend>& sequence,
                       const typename Backend::Options& options) {
  if constexpr (!requires { Backend::trees; }) {
    return false;
  } else {
    if (options.max_rollback == 0) return false;
    grow_random_tree<In>(random, sequence, options.max_rollback, options.max_append);
    return true;
  }
}

template <kvpolicy::Element E, class In, class Backend = HostBackend<E>>
void random_operations(std::uint64_t seed, const ModelShape& shape, const std::vector<HeadSpec>& heads,
                       typename Backend::Options options, const Logits& logits, std::size_t operations) {
  CAPTURE(seed);
  Random random{seed};
  typename Backend::Memory memory;
  options.memory = &memory;
  if constexpr (requires { memory.slow; }) options.slow_memory = &memory.slow;
  if constexpr (requires { memory.pool; }) options.pool = &memory.pool;
  {
    std::vector<Sequence<E, Backend>> sequences;
    sequences.emplace_back(shape, heads, options, logits);
    check_bytes(memory, sequences);
    for (std::size_t i = 0; i < operations; ++i) {
      CAPTURE(i);
      Sequence<E, Backend>& sequence = sequences[below(random, sequences.size())];
      if constexpr (requires { Backend::replace(random, sequence.cache()); }) {
        if (below(random, 3) == 0) Backend::replace(random, sequence.cache());
        check_bytes(memory, sequences);
        sequence.check();
      }
      const std::size_t what = below(random, 40);
      if (what < 8 && sequence.tokens() > sequence.commit_point()) {
        const std::size_t span = sequence.tokens() - sequence.commit_point();
        sequence.truncate(sequence.tokens() - below(random, span + 1));
      } else if (what == 8) {
        sequence.commit();
      } else if (what == 9) {
        sequence.compress();
      } else if (what == 10) {
        if (sequences.size() == 1) {
          sequences.push_back(sequences[0].fork());
        } else {
          sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(below(random, 2)));
        }
      } else if (what > 11 && what < 20 && random_tree_calls<In>(random, sequence, options)) {
      } else if (what == 11) {
        random_call<E>(random, sequence, options.max_append);
      } else {
        random_call<In>(random, sequence, options.max_append);
      }
      check_bytes(memory, sequences);
    }
    for (auto& sequence : sequences) sequence.check();
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.live_blocks() == 0);
}

/// Tests several sequences that together have every head, rollback, page size and group.
template <kvpolicy::Element E, class In, class Backend = HostBackend<E>>
void random_sequences(std::uint64_t seed, std::size_t operations) {
  struct Case {
    std::size_t group, kv_heads, layers, max_rollback, max_append, page_rows;
  };
  const std::vector<Case> cases{
      {1, 13, 1, 0, 1, 16}, {2, 6, 2, 0, 40, 16},  {7, 3, 1, 1, 1, 64},   {1, 12, 1, 5, 9, 16},
      {2, 7, 1, 5, 1, 64},  {1, 12, 1, 70, 3, 16}, {2, 5, 1, 70, 70, 64}, {7, 2, 1, 0, 5, 16},
      {1, 11, 1, 1, 2, 16}, {1, 8, 1, 0, 100, 64},
  };
  std::size_t first = seed;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& one = cases[i];
    CAPTURE(i);
    const ModelShape shape{one.layers, one.group * one.kv_heads, one.kv_heads, 64};
    const auto heads = some_heads(first, shape.kv_head_count(), one.max_rollback == 0);
    first += shape.kv_head_count();
    Logits logits;
    if (i % 2 == 1) logits.scale = 0.2F;
    if (i % 3 == 1) logits.softcap = 5.0F;
    if (i % 3 == 2) {
      for (std::size_t h = 0; h < shape.q_heads; ++h)
        logits.sinks.push_back(0.1F * static_cast<float>(h) - 1.0F);
    }
    CacheOptions options;
    options.max_rollback = one.max_rollback;
    options.max_append = one.max_append;
    options.page_rows = one.page_rows;
    random_operations<E, In, Backend>(seed * 1000 + i, shape, heads, options, logits, repeats(operations));
  }
}

}  // namespace test
