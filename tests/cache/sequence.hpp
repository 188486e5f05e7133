// SPDX-License-Identifier: Apache-2.0
//
// A cache together with slow models of its heads. Every call goes to both, and everything observable of the
// cache is compared with the models.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/host_backend.hpp"
#include "cache/layer_model.hpp"
#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/plans.hpp"
#include "support/policy_model.hpp"
#include "support/question_free_oracle.hpp"
#include "support/rule_check.hpp"
#include "support/tensors.hpp"

namespace test {

struct Call {
  std::size_t tokens = 1;
  Read read = Read::all;
  bool refresh_selection = false;
  bool apart = false;                         // append, then attend
  const kvpolicy::TokenTree* tree = nullptr;  // the tokens are its last nodes
  Layout layout = Layout::contiguous;
};

template <kvpolicy::Element E, class Backend = HostBackend<E>>
class Sequence {
 public:
  using Layer = LayerModel<E>;
  using Head = typename Layer::Head;
  using Cache = typename Backend::Cache;
  using Options = typename Backend::Options;
  using Out = typename Backend::Out;

  Sequence(const ModelShape& shape, const std::vector<HeadSpec>& heads, const Options& options, Logits logits)
      : shape_{shape},
        options_{options},
        logits_{std::move(logits)},
        cache_{plan_for(shape, heads), options} {
    std::size_t number = 0;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      Layer& layer = layers_.emplace_back();
      layer.shape = shape.layer(l);
      layer.logits = logits_;
      for (std::size_t h = 0; h < layer.shape.kv_heads; ++h) {
        layer.heads.push_back(Head{HeadModel{heads[number++]}, {}, {}, {}, {}});
      }
    }
  }

  [[nodiscard]] Cache& cache() { return cache_; }
  [[nodiscard]] Sequence fork() const { return Sequence{shape_, options_, logits_, cache_.fork(), layers_}; }
  [[nodiscard]] std::size_t tokens() const { return cached().queries.size(); }
  [[nodiscard]] std::size_t commit_point() const {
    std::size_t latest = 0;
    for (const Layer& layer : layers_) latest = std::max(latest, layer.committed);
    return latest;
  }
  [[nodiscard]] std::size_t pending_nodes() const { return cached().node_queries.size(); }

  /// Makes the same call on every layer, with numbers of this type.
  template <class In>
  void run(Random& random, const Call& call) {
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      if (!layers_[l].heads.empty()) run_layer<In>(random, l, call);
    }
    check();
  }

  void truncate(std::size_t tokens) {
    cache_.truncate(tokens);
    for (Layer& layer : layers_) {
      const std::size_t text = std::min(tokens, layer.queries.size());
      const std::size_t nodes = std::min(tokens - text, layer.node_queries.size());
      layer.node_queries.resize(nodes);
      layer.queries.resize(text);
      for (Head& head : layer.heads) {
        head.nodes.resize(nodes);
        head.text.resize(text);
        head.model.truncate(tokens);
      }
    }
    check();
  }

  /// Accepts the nodes of `path` of the pending tree.
  void accept(const std::vector<std::size_t>& path) {
    cache_.accept(path);
    for (Layer& layer : layers_) {
      if (layer.heads.empty()) continue;
      std::size_t same = layer.queries.size();  // text, and nodes that did not move
      for (std::size_t i = 0; i < path.size() && path[i] == i; ++i) ++same;
      for (Head& head : layer.heads) head.model.truncate(same);
      for (const std::size_t node : path) {
        layer.queries.push_back(layer.node_queries[node]);
        for (Head& head : layer.heads) head.text.push_back(head.nodes[node]);
      }
      layer.node_queries.clear();
      for (Head& head : layer.heads) head.nodes.clear();
    }
    check();
  }

  void commit() {
    cache_.commit();
    for (Layer& layer : layers_) layer.commit(layer.queries.size());
    check();
  }

  void compress() {
    commit();
    std::vector<std::vector<Rows>> before(shape_.layers);
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      for (std::size_t h = 0; h < layers_[l].heads.size(); ++h) before[l].push_back(held(l, h));
    }
    cache_.compress();
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      for (std::size_t h = 0; h < layers_[l].heads.size(); ++h) {
        if (layers_[l].heads[h].model.spec().kind == Kind::budget) follow_compress(l, h, before[l][h]);
      }
    }
    check();
  }

  /// Checks everything that is observable between two calls.
  void check() {
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      const Layer& layer = layers_[l];
      if (layer.heads.empty()) continue;
      CHECK(cache_.tokens(l) == layer.queries.size() + layer.node_queries.size());
      for (std::size_t h = 0; h < layer.heads.size(); ++h) {
        CAPTURE(l);
        CAPTURE(h);
        check_held(l, h);
        check_rule<std::size_t>(cache_.plan().at(l, h).rule(layer.shape.head_dim), layer.heads[h].model,
                                layer.queries.size());
        if (layer.node_queries.empty()) check_shown(l, h);
      }
    }
    CHECK(cache_.commit_point() == commit_point());
    if constexpr (requires { Backend::check_slow(cache_, std::size_t{}); }) {
      Backend::check_slow(cache_, bytes_that_stay());
    }
  }

 private:
  Sequence(const ModelShape& shape, const Options& options, const Logits& logits, Cache cache,
           const std::vector<Layer>& layers)
      : shape_{shape}, options_{options}, logits_{logits}, cache_{std::move(cache)}, layers_{layers} {}

  // Equal up to the rounding of scales and zeros in half, among the numbers that were coded: of a `rotated` row, a zero
  // that moves adds up in the channel that sums the block.
  static bool is_near(const std::vector<double>& a, const std::vector<double>& b, bool rotated) {
    if (a.size() != b.size()) return false;
    std::vector<double> apart;
    std::ranges::transform(a, b, std::back_inserter(apart), std::minus{});
    if (rotated) apart = oracle::hadamard(apart);
    return std::ranges::all_of(apart, [](double number) { return std::abs(number) <= 1e-2; });
  }

  // The first layer that has a cache.
  [[nodiscard]] const Layer& cached() const {
    return *std::ranges::find_if(layers_, [](const Layer& layer) { return !layer.heads.empty(); });
  }

  static kvpolicy::HeadPlan<E> plan_for(const ModelShape& shape, const std::vector<HeadSpec>& heads) {
    if constexpr (requires { Backend::plan_of(shape, heads); }) {
      return Backend::plan_of(shape, heads);
    } else {
      return plan_of<E>(shape, heads);
    }
  }

  // Of all rows that never change and are never dropped: numbers and codes, without scales.
  [[nodiscard]] std::size_t bytes_that_stay() const {
    std::size_t bits = 0;
    for (const Layer& layer : layers_) {
      const std::size_t numbers = layer.shape.head_dim + layer.shape.value_dim;
      for (const Head& head : layer.heads) {
        const HeadSpec& spec = head.model.spec();
        if (spec.kind == Kind::window || spec.kind == Kind::budget) continue;
        for (const std::int64_t row : head.model.kept()) {
          if (spec.bits == 0) bits += numbers * 16;
          if (head.model.key_is_quantized(row) && head.model.value_is_quantized(row)) {
            bits += layer.shape.head_dim * spec.bits_of(true) + layer.shape.value_dim * spec.bits_of(false);
          }
        }
      }
    }
    return bits / 8;
  }

  // All rows that a policy holds, whether or not a query sees them; `appended` queries will attend to them.
  [[nodiscard]] Rows held(std::size_t l, std::size_t h, Read read = Read::all,
                          std::size_t appended = 0) const {
    return Backend::held(cache_, l, h, read, appended);
  }

  void check_held(std::size_t l, std::size_t h) {
    Head& head = layers_[l].heads[h];
    const Rows rows = held(l, h);
    Backend::check_held(cache_, l, h, rows, head.model);
    bool exact = true;
    bool again = true;
    for (const auto& entry : rows) {  // clang 14 cannot capture parts of a structured binding in the lambdas
                                      // below
      const std::int64_t position = entry.first;
      const oracle::Row& row = entry.second;
      const oracle::Row& original = head.text[static_cast<std::size_t>(position)];
      const auto side = [&](bool quantized, const std::vector<double>& now, const std::vector<double>& then,
                            auto& seen, bool is_key) {
        const auto before = seen.find(position);
        const HeadSpec& spec = head.model.spec();
        const bool returned = spec.returns_rows && before != seen.end();
        const bool rotated = is_key ? spec.key_hadamard : spec.value_hadamard;
        if (!quantized) {
          exact = exact && (returned ? is_near(before->second, now, rotated) : same_bits(now, then));
          return;
        }
        const auto [known, first] = seen.emplace(position, now);
        again = again && (returned ? is_near(known->second, now, rotated) : same_bits(known->second, now));
        if (first) layers_[l].check_quantized(head, position, now, then, is_key);
      };
      side(head.model.key_is_quantized(position), row.key, original.key, head.quantized_keys, true);
      side(head.model.value_is_quantized(position), row.value, original.value, head.quantized_values, false);
    }
    CHECK(exact);
    CHECK(again);
  }

  // Compares the rows that the next query would read.
  void check_shown(std::size_t l, std::size_t h) const {
    const Layer& layer = layers_[l];
    const auto next = static_cast<std::int64_t>(layer.queries.size());
    for (const Read read : {Read::all, Read::selected}) {
      std::set<std::int64_t> expected;
      for (std::int64_t p = 0; p < next; ++p) {
        if (layer.heads[h].model.reads(p, next, next, read == Read::selected)) expected.insert(p);
      }
      std::set<std::int64_t> shown;
      for (const auto& [position, row] : Backend::shown(cache_, l, h, read)) shown.insert(position);
      CHECK(shown == expected);
    }
  }

  template <class In>
  void run_layer(Random& random, std::size_t l, const Call& call) {
    Layer& layer = layers_[l];
    const std::size_t tokens = call.tokens;
    const std::size_t text = layer.queries.size();
    const std::size_t before = text + layer.node_queries.size();
    const kvpolicy::LayerShape& shape = layer.shape;
    Tensor<In> q{tokens, shape.q_heads, shape.head_dim, call.layout};
    Tensor<In> k{tokens, shape.kv_heads, shape.head_dim, call.layout};
    Tensor<In> v{tokens, shape.kv_heads, shape.value_dim, call.layout};
    Tensor<Out> out{tokens, shape.q_heads, shape.value_dim, call.layout};
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
    std::vector<float> log_sum_exp(tokens * shape.q_heads, NAN);
    kvpolicy::AttendOptions options;
    options.scale = logits_.scale;
    options.softcap = logits_.softcap;
    options.attention_sink_bias = logits_.sinks;
    if (!logits_.sinks.empty())
      options.attention_sink_bias = options.attention_sink_bias.first(shape.q_heads);
    options.log_sum_exp = log_sum_exp;
    options.read = call.read;
    options.refresh_selection = call.refresh_selection;
    options.tree = call.tree;

    const std::size_t rollback = options_.max_rollback;
    const auto committed_at = [&](std::size_t end) { return end - std::min(end, rollback); };
    if (call.apart) {
      if constexpr (requires { Backend::trees; }) {
        cache_.append(l, std::as_const(k).view(), std::as_const(v).view(), options);
      } else {
        cache_.append(l, std::as_const(k).view(), std::as_const(v).view());
      }
      layer.commit(committed_at(before));
    }
    std::vector<Rows> rows;
    std::vector<std::vector<oracle::Row>> nodes;  // one list for each head
    std::vector<bool> refreshed(layer.heads.size(), false);
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      rows.push_back(held(l, h, Read::all, call.apart ? tokens : 0));
      const HeadModel& model = layer.heads[h].model;
      refreshed[h] =
          model.spec().kind == Kind::retrieval &&
          (call.read == Read::selected ? call.refresh_selection || model.selection_is_stale() : false);
    }
    if (call.apart) {
      cache_.attend(l, std::as_const(q).view(), out.view(), options);
    } else {
      cache_.step(l, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view(),
                  options);
    }
    CHECK(out.guards_intact());

    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      Head& head = layer.heads[h];
      // Rows of the tail are exact. Rows of the chunk are as the caller gave them, or rounded as in the tail
      // if they were appended before.
      for (std::size_t p = layer.committed; p < text; ++p)
        rows[h][static_cast<std::int64_t>(p)] = head.text[p];
      nodes.push_back(head.nodes);
      for (std::size_t i = 0; i < tokens; ++i) {
        const auto position = static_cast<std::int64_t>(
            call.tree == nullptr ? before + i : text + call.tree->depth(before - text + i));
        auto& own = call.tree == nullptr ? head.text : head.nodes;
        own.push_back({position, Layer::rounded(k.row(i, h)), Layer::rounded(v.row(i, h))});
        const oracle::Row row =
            call.apart ? own.back() : oracle::Row{position, k.row_of_doubles(i, h), v.row_of_doubles(i, h)};
        if (call.tree == nullptr) {
          rows[h][position] = row;
        } else {
          nodes.back().push_back(row);
        }
      }
      if (refreshed[h]) follow_refresh(l, h, q, before + tokens);
    }
    check_outputs(random, layer, q, out, log_sum_exp, rows, nodes, before, call);
    layer.add_up(q, rows, before);

    for (std::size_t i = 0; i < tokens; ++i) {
      auto& query = (call.tree == nullptr ? layer.queries : layer.node_queries).emplace_back();
      for (std::size_t h = 0; h < layer.shape.q_heads; ++h) query.push_back(Layer::rounded(q.row(i, h)));
    }
    // Added-up attention cannot be taken back, so its rows are committed.
    const bool adds_up =
        std::ranges::any_of(layer.heads, [](const Head& head) { return head.model.spec().adds_up(); });
    if (adds_up) layer.commit(before + tokens);
    if (!call.apart) layer.commit(committed_at(before + tokens));
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      HeadModel& model = layer.heads[h].model;
      if (model.spec().kind == Kind::retrieval && call.read == Read::all && call.refresh_selection) {
        follow_refresh(l, h, q, before + tokens);
      }
    }
    // One head that is due for compression commits its layer.
    const auto due = [](const Head& head) { return head.model.wants_compress(); };
    if (std::ranges::any_of(layer.heads, due)) {
      layer.commit(before + tokens);
      for (std::size_t h = 0; h < layer.heads.size(); ++h) {
        if (due(layer.heads[h])) follow_compress(l, h, Layer::text_rows(layer.heads[h]));
      }
    }
  }

  template <class In>
  void check_outputs(Random& random, const Layer& layer, const Tensor<In>& q, const Tensor<Out>& out,
                     const std::vector<float>& log_sum_exp, const std::vector<Rows>& rows,
                     const std::vector<std::vector<oracle::Row>>& nodes, std::size_t before,
                     const Call& call) const {
    // The nodes that a query sees: its own and its ancestors.
    const auto path_of = [&](std::size_t token) {
      std::set<std::size_t> path;
      if (call.tree == nullptr) return path;
      for (std::size_t node = call.tree->size() - q.tokens() + token; node != kvpolicy::TokenTree::text;
           node = call.tree->parent(node)) {
        path.insert(node);
      }
      return path;
    };
    const auto position_of = [&](std::size_t token) {
      return static_cast<std::int64_t>(
          call.tree == nullptr ? before + token : layer.queries.size() + path_of(token).size() - 1);
    };
    std::int64_t first = position_of(0);
    for (std::size_t token = 0; token < q.tokens(); ++token) first = std::min(first, position_of(token));
    std::set<std::size_t> sample{0, q.tokens() - 1};
    for (int i = 0; i < 3; ++i) sample.insert(below(random, q.tokens()));
    double error = 0;
    double lse_error = 0;
    for (const std::size_t token : sample) {
      const std::int64_t t = position_of(token);
      const auto path = path_of(token);
      for (std::size_t q_head = 0; q_head < layer.shape.q_heads; ++q_head) {
        const std::size_t h = q_head / layer.shape.queries_per_kv();
        const HeadModel& model = layer.heads[h].model;
        std::vector<const oracle::Row*> candidates;
        for (const auto& [p, row] : rows[h]) candidates.push_back(&row);
        for (const std::size_t node : path) candidates.push_back(&nodes[h][node]);
        std::vector<const oracle::Row*> read_rows;
        std::vector<oracle::Row> rotated;
        rotated.reserve(model.spec().sinks);
        for (const oracle::Row* candidate : candidates) {
          const oracle::Row& row = *candidate;
          const std::int64_t p = row.position;
          if (!model.reads(p, t, first, call.read == Read::selected)) continue;
          const auto latest = static_cast<std::int64_t>(model.spec().sinks + model.spec().recent) - 1;
          if (model.spec().in_cache && p < static_cast<std::int64_t>(model.spec().sinks) && t > latest) {
            rotated.push_back(row);
            rotated.back().key = oracle::turn(row.key, static_cast<double>(t - latest), rotary_theta);
            read_rows.push_back(&rotated.back());
          } else {
            read_rows.push_back(&row);
          }
        }
        const auto expected = oracle::attend(q.row_of_doubles(token, q_head), read_rows,
                                             layer.options(q_head), layer.shape.value_dim);
        const double one = largest_difference(expected.out, out.row(token, q_head));
        const double lse = std::abs(expected.log_sum_exp -
                                    static_cast<double>(log_sum_exp[token * layer.shape.q_heads + q_head]));
        error = !(one <= error) ? one : error;
        lse_error = !(lse <= lse_error) ? lse : lse_error;
      }
    }
    CHECK(error <= Backend::out_error);
    CHECK(lse_error <= Backend::lse_error);
  }

  template <class In>
  void follow_refresh(std::size_t l, std::size_t h, const Tensor<In>& q, std::size_t tokens) {
    HeadModel& model = layers_[l].heads[h].model;
    const auto chunk_rows = static_cast<std::int64_t>(model.spec().chunk);
    const std::int64_t until = model.full_chunks() * chunk_rows;
    std::set<std::int64_t> chosen;
    for (const auto& [position, row] : held(l, h, Read::selected)) {
      if (position < until) chosen.insert(position / chunk_rows);
    }
    const double slack = model.spec().min_max ? Backend::bound_error : Backend::mean_error;
    CHECK(model.may_select(chosen, layers_[l].chunk_scores(h, q), slack));
    model.select(chosen, tokens);
  }

  void follow_compress(std::size_t l, std::size_t h, const Rows& before) {
    HeadModel& model = layers_[l].heads[h].model;
    if (!model.is_compressible()) return model.release();
    std::vector<std::int64_t> survivors;
    for (const auto& [position, row] : held(l, h)) survivors.push_back(position);
    const auto [scores, votes, slack] = layers_[l].ranking(h, before, Backend::score_error);
    CHECK(model.may_survive(survivors, scores, votes, slack));
    model.compress(survivors);
  }

  ModelShape shape_;
  Options options_;
  Logits logits_;
  Cache cache_;
  std::vector<Layer> layers_;
};

}  // namespace test
