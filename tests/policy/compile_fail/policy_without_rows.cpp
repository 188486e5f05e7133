// SPDX-License-Identifier: Apache-2.0
//
// A policy that does not say how many rows it holds, as every policy must.
// expect: seen.rows()
#include <kvpolicy/kvpolicy.hpp>

class Own {
 public:
  using element_type = float;
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
    using policy_type = Own;
  };
  Own(const Config&, const kvpolicy::StorageContext&) {}
  void reserve(std::size_t) {}
  void release_unused() noexcept {}
  void commit(const kvpolicy::Segment&) noexcept {}
  void segments(const kvpolicy::ReadRequest&, kvpolicy::SegmentList&) const {}
  std::size_t bytes() const { return 0; }
  std::size_t shared_bytes() const { return 0; }
};

const kvpolicy::HeadSettings<float> settings = Own::Config{};
