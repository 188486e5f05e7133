// SPDX-License-Identifier: Apache-2.0
//
// Queries and rows that are nodes of a tree, in layers that no cache would show: both kernels and every
// cut into tiles, row tiles and parts, compared with ScalarEngine and with attention in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <set>
#include <vector>

#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/cpu/engine.hpp>

#include "cpu/emulated_tiles.hpp"
#include "cpu/random_layer.hpp"
#include "support/compare.hpp"
#include "support/random_tree.hpp"

namespace {
using namespace kvpolicy;
using test::below;
using test::Random;
using test::Tensor;

// As in engine_test.cpp.
constexpr double tolerance = 5e-5;
constexpr double tolerance_to_double = 1.5e-5;

struct Workers {
  std::size_t count;
  [[nodiscard]] std::size_t threads() const { return count; }
  template <class Body>
  void operator()(std::size_t workers, const Body& body) const {
    for (std::size_t i = workers; i > 0; --i) body(i - 1);
  }
};
struct SmallParts : cpu::DefaultTuning {
  static constexpr std::size_t task_weight = 1;
  static constexpr std::size_t tasks_per_thread = 50;
};
struct OddSizes : SmallParts {
  static constexpr std::size_t stream_rows = 5;
  static constexpr std::size_t tile_rows = 7;
  static constexpr std::size_t stream_queries = 3;
  static constexpr std::size_t tile_queries = 10;
};
// Products in tiles, with numbers split into two terms: rows in bfloat16 are among the formats.
struct InTiles : SmallParts {
  static constexpr std::size_t stream_queries = 1;
  using Tiles = test::EmulatedTiles;
  static cpu::MatrixUnit matrix_unit() { return cpu::MatrixUnit::tiles; }
};

// A random layer of text, followed by the rows of a tree's nodes, in several segments.
struct TreeCall {
  test::RandomCall<float> call;
  TokenTree tree;
  std::size_t head_dim;
  std::vector<std::int64_t> positions;
  std::vector<std::size_t> text_segments;  // of each head

  TreeCall(Random& random, std::size_t kv_heads, std::size_t group, std::size_t dim, std::size_t queries,
           std::size_t nodes)
      : call{random, kv_heads, group, dim, queries}, tree{test::random_tree(random, nodes)}, head_dim{dim} {
    call.options.tree = &tree;
    for (std::size_t node = 0; node < nodes; ++node) {
      positions.push_back(call.first_position + static_cast<std::int64_t>(tree.depth(node)));
    }
    for (auto& head : call.heads) {
      text_segments.push_back(head.segments().size());
      for (std::size_t node = 0; node < nodes;) {
        const std::size_t rows = 1 + below(random, nodes - node);
        const RowFormat keys{.encoding = test::one_of(random, test::dense_encodings)};
        const RowFormat values{.encoding = test::one_of(random, test::dense_encodings)};
        head.add(random, keys, values, rows, positions[node], call.first_position,
                 {.runs = false, .positions = false});
        Segment& segment = head.segment(head.segments().size() - 1);
        segment.node = node;
        segment.positions = positions.data() + node;
        node += rows;
      }
    }
    call.bind();
  }
  TreeCall(const TreeCall&) = delete;
  TreeCall& operator=(const TreeCall&) = delete;
  ~TreeCall() = default;

  struct Result {
    std::vector<float> out, log_sum_exp;
  };
  template <class Engine>
  Result attend(Engine engine) {
    const std::size_t q_heads = call.heads.size() * call.group;
    Tensor<float> out{call.queries.tokens(), q_heads, head_dim};
    Result result{{}, std::vector<float>(call.queries.tokens() * q_heads, -7.0F)};
    call.attend(engine, out, result.log_sum_exp);
    REQUIRE(out.guards_intact());
    for (std::size_t token = 0; token < call.queries.tokens(); ++token) {
      for (std::size_t head = 0; head < q_heads; ++head) {
        const auto row = out.row(token, head);
        result.out.insert(result.out.end(), row.begin(), row.end());
      }
    }
    return result;
  }

  // The result of one query head in double. Ancestors are a set; instead of the query, keys are
  // rotated.
  [[nodiscard]] oracle::Result expected(std::size_t token, std::size_t q_head) const {
    std::set<std::size_t> path;
    const std::size_t own = tree.size() - call.queries.tokens() + token;
    for (std::size_t node = own; node != TokenTree::text; node = tree.parent(node)) path.insert(node);
    const std::int64_t t = call.first_position + static_cast<std::int64_t>(path.size()) - 1;
    std::vector<oracle::Row> rows;
    std::vector<float> row(head_dim);
    for (const Segment& segment : call.heads[q_head / call.group].segments()) {
      segment.for_each_run([&](const RowRun& run) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
          const std::int64_t p = segment.positions != nullptr
                                     ? segment.positions[i]
                                     : segment.position + static_cast<std::int64_t>(i);
          if (p > t || (segment.window != unlimited_window && p <= t - segment.window)) continue;
          if (segment.node != no_node && !path.contains(segment.node + i)) continue;
          oracle::Row& seen = rows.emplace_back();
          load_row(segment.keys, i, row);
          seen.key.assign(row.begin(), row.end());
          load_row(segment.values, i, row);
          seen.value.assign(row.begin(), row.end());
          const std::int64_t latest = segment.rotation.latest_position;
          if (segment.rotation.inverse_frequencies != nullptr && t > latest) {
            seen.key = oracle::turn(seen.key, static_cast<double>(t - latest), test::theta);
          }
        }
      });
    }
    std::vector<const oracle::Row*> list;
    for (const auto& seen : rows) list.push_back(&seen);
    oracle::Options options;
    options.scale =
        static_cast<double>(call.options.scale.value_or(1.0F / std::sqrt(static_cast<float>(head_dim))));
    options.softcap = static_cast<double>(call.options.softcap);
    if (!call.attention_sink_bias.empty())
      options.sink_logit = static_cast<double>(call.attention_sink_bias[q_head]);
    return oracle::attend(call.queries.row_of_doubles(token, q_head), list, options);
  }
};

void check_same(const TreeCall& call, const TreeCall::Result& a, const TreeCall::Result& b) {
  REQUIRE(test::largest_difference(a.out, b.out) <= call.call.tolerance(tolerance));
  REQUIRE(test::largest_difference(a.log_sum_exp, b.log_sum_exp) <= call.call.tolerance(1e-4));
}

}  // namespace

TEST_CASE("nodes of a tree: every engine is attention in double over what each query sees") {
  Random random{51};
  const std::vector<std::size_t> node_counts{1, 2, 3, 7, 16, 33, 63, 64, 65, 130};
  const std::vector<std::size_t> groups{1, 2, 3, 4, 7, 8, 12, 70};
  for (int round = 0; round < 120; ++round) {
    CAPTURE(round);
    const std::size_t nodes = test::one_of(random, node_counts);
    std::size_t group = test::one_of(random, groups);
    if (group * nodes > 300) group = 2;
    const std::size_t queries = round % 3 == 0 ? nodes : 1 + below(random, nodes);
    const std::size_t head_dim = round % 4 == 0 ? 80 : 64;
    CAPTURE(nodes);
    CAPTURE(group);
    CAPTURE(queries);
    TreeCall call{random, 1 + below(random, 2), group, head_dim, queries, nodes};
    const std::size_t q_heads = call.call.heads.size() * group;
    const auto scalar = call.attend(ScalarEngine{});
    for (int sample = 0; sample < 4; ++sample) {
      const std::size_t token = sample == 0 ? queries - 1 : below(random, queries);
      const std::size_t q_head = below(random, q_heads);
      const auto expected = call.expected(token, q_head);
      const std::size_t at = token * q_heads + q_head;
      const auto begin = scalar.out.begin() + static_cast<std::ptrdiff_t>(at * head_dim);
      const std::vector<float> out{begin, begin + static_cast<std::ptrdiff_t>(head_dim)};
      REQUIRE(test::largest_difference(out, expected.out) <= tolerance_to_double);
      REQUIRE(test::largest_difference(std::vector{scalar.log_sum_exp[at]},
                                       std::vector{expected.log_sum_exp}) <= 5e-5);
    }
    for (const std::size_t threads : std::initializer_list<std::size_t>{1, 2}) {
      CAPTURE(threads);
      const Workers pool{threads};
      check_same(call, call.attend(cpu::Engine<Workers>{pool}), scalar);
      check_same(call, call.attend(cpu::Engine<Workers, SmallParts>{pool}), scalar);
      check_same(call, call.attend(cpu::Engine<Workers, OddSizes>{pool}), scalar);
      check_same(call, call.attend(cpu::Engine<Workers, InTiles>{pool}), scalar);
    }
    check_same(call, call.attend(cpu::Engine<>{}), scalar);
  }
}

TEST_CASE("a chain of nodes gives the bits that rows of the text give") {
  Random random{53};
  for (const std::size_t queries : std::initializer_list<std::size_t>{1, 2, 3, 20, 70}) {
    TreeCall call{random, 2, 3, 64, queries, queries + below(random, 9)};
    call.tree = {};
    while (call.tree.size() < call.positions.size()) {
      const std::size_t node = call.tree.size();
      call.tree.add(node == 0 ? TokenTree::text : node - 1);
      call.positions[node] = call.call.first_position + static_cast<std::int64_t>(node);
    }
    const auto of_nodes = [&](auto engine) {
      const auto as_tree = call.attend(engine);
      const std::int64_t root = call.call.first_position;
      std::vector<Segment> nodes;
      for (std::size_t h = 0; h < call.call.heads.size(); ++h) {
        auto& head = call.call.heads[h];
        for (std::size_t s = call.text_segments[h]; s < head.segments().size(); ++s) {
          nodes.push_back(head.segment(s));
          head.segment(s).node = no_node;
        }
      }
      call.call.options.tree = nullptr;
      call.call.first_position = root + static_cast<std::int64_t>(call.tree.size() - queries);
      const auto as_text = call.attend(engine);
      call.call.options.tree = &call.tree;
      call.call.first_position = root;
      for (std::size_t h = 0, n = 0; h < call.call.heads.size(); ++h) {
        auto& head = call.call.heads[h];
        for (std::size_t s = call.text_segments[h]; s < head.segments().size(); ++s)
          head.segment(s) = nodes[n++];
      }
      REQUIRE(test::same_bits(as_tree.out, as_text.out));
      REQUIRE(test::same_bits(as_tree.log_sum_exp, as_text.log_sum_exp));
    };
    of_nodes(ScalarEngine{});
    of_nodes(cpu::Engine<>{});
    of_nodes(cpu::Engine<Workers, OddSizes>{Workers{2}});
    of_nodes(cpu::Engine<Workers, InTiles>{Workers{2}});
  }
}

TEST_CASE("NaN and infinity of a node affect its own query and its descendants', and no others") {
  Random random{57};
  for (const std::size_t nodes : std::initializer_list<std::size_t>{3, 9, 40}) {
    for (const float number :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const bool of_keys : {false, true}) {
        if (of_keys && !std::isnan(number)) continue;
        TreeCall call{random, 1, 4, 64, nodes, nodes};
        auto& head = call.call.heads[0];
        const std::size_t s =
            call.text_segments[0] + below(random, head.segments().size() - call.text_segments[0]);
        head.segment(s).window = unlimited_window;
        const std::size_t row = below(random, head.segment(s).rows);
        const std::size_t node = head.segment(s).node + row;
        (of_keys ? head.keys(s) : head.values(s)).overwrite(row, 64, number);
        const auto check = [&](const TreeCall::Result& result) {
          for (std::size_t token = 0; token < nodes; ++token) {
            std::size_t at = token;
            while (at != TokenTree::text && at != node) at = call.tree.parent(at);
            for (std::size_t i = token * 4 * 64; i < (token + 1) * 4 * 64; ++i) {
              REQUIRE(std::isfinite(result.out[i]) == (at != node));
            }
          }
        };
        check(call.attend(ScalarEngine{}));
        check(call.attend(cpu::Engine<>{}));
        check(call.attend(cpu::Engine<Workers, OddSizes>{Workers{2}}));
      }
    }
  }
}
