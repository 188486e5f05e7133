// SPDX-License-Identifier: Apache-2.0
//
// A user's own policy: it keeps `rows` rows, of which a share are the first rows of the text and
// the others the latest ones. The policy decides which rows live; its rule states the same in a few
// numbers, from which a device cache can run it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/kvpolicy.hpp>

template <kvpolicy::Element E>
class OpeningAndLatest {
 public:
  using element_type = E;
  struct Config {
    using policy_type = OpeningAndLatest;
    std::size_t rows = 64;
    double opening_share = 0.25;
    friend bool operator==(const Config&, const Config&) = default;
  };
  OpeningAndLatest(const Config& config, const kvpolicy::StorageContext& context)
      : window_{rule(config, context.head_dim).window_rule()}, opening_{{}, context}, latest_{{}, context} {
    kvpolicy::require(window_.sinks < config.rows, "OpeningAndLatest: the opening takes ", window_.sinks,
                      " of ", config.rows, " rows, must leave at least one");
  }
  static kvpolicy::HeadRule rule(const Config& config, std::size_t /*head_dim*/) {
    kvpolicy::HeadRule rule;
    rule.sinks = static_cast<std::size_t>(static_cast<double>(config.rows) * config.opening_share);
    rule.recent = config.rows - std::min(rule.sinks, config.rows);
    rule.prefill_chunk_mask = true;  // a call's queries see all rows of their call
    return rule;
  }

  void reserve(std::size_t rows) {
    const std::size_t opening = std::min(rows, window_.sinks - opening_.end());
    opening_.reserve(opening);
    latest_.reserve(rows - opening, window_.recent);
  }
  void release_unused() noexcept {
    opening_.release_unused();
    latest_.release_unused();
  }
  void commit(const kvpolicy::Segment& rows) noexcept {
    const std::size_t opening = std::min(rows.rows, window_.sinks - opening_.end());
    opening_.append(rows.part(0, opening));
    latest_.append(rows.part(opening, rows.rows - opening), window_.recent);
  }
  void segments(const kvpolicy::ReadRequest& request, kvpolicy::SegmentList& out) const {
    const std::size_t sinks = window_.sinks;  // rows of `latest_` are numbered after the sinks
    opening_.show(0, opening_.end(), {}, out);
    const auto read = window_.recent_among({sinks + latest_.begin(), sinks + latest_.end()},
                                           static_cast<std::size_t>(request.first_position));
    latest_.show(read.begin - sinks, read.rows(), {.position = static_cast<std::int64_t>(read.begin)}, out);
  }
  std::size_t rows() const { return opening_.end() + latest_.end() - latest_.begin(); }
  std::size_t bytes() const { return opening_.bytes() + latest_.bytes(); }
  std::size_t shared_bytes() const { return opening_.shared_bytes() + latest_.shared_bytes(); }

 private:
  kvpolicy::WindowRule<std::size_t> window_;
  kvpolicy::DenseStorage<E> opening_, latest_;
};
