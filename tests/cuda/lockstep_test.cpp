// SPDX-License-Identifier: Apache-2.0
//
// The same random operations on a host cache and a device cache, side by side, and on the set-based models of
// their heads: after each operation both show the same rows and have read the same attention.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

namespace {

using kvpolicy::AttendOptions;
using kvpolicy::HeadRule;
using test::Read;

/// A device cache, and a host cache to which every call goes, too.
template <kvpolicy::Element E>
class TwoCaches : public test::WaitingCache<E> {
 public:
  using Device = test::WaitingCache<E>;
  using Host = kvpolicy::KvCache<E>;

  TwoCaches(const kvpolicy::HeadPlan<E>& plan, const kvpolicy::gpu::CacheOptions& options)
      : Device{plan, options}, host_{plan, host_options(options)} {}

  [[nodiscard]] TwoCaches fork() const { return TwoCaches{Device::fork(), host_.fork()}; }
  [[nodiscard]] const Host& host() const { return host_; }

  template <class Q, class K, class V, class Out>
  void step(std::size_t l, Q q, K k, V v, Out out, const AttendOptions& options) {
    Device::step(l, q, k, v, out, options);
    on_host(l, out, options,
            [&](auto own_out, const AttendOptions& own) { host_.step(l, q, k, v, own_out, own); });
  }
  template <class K, class V>
  void append(std::size_t l, K k, V v, const AttendOptions& options) {
    Device::append(l, k, v, options);
    host_.append(l, k, v, options);
  }
  template <class Q, class Out>
  void attend(std::size_t l, Q q, Out out, const AttendOptions& options) {
    Device::attend(l, q, out, options);
    on_host(l, out, options,
            [&](auto own_out, const AttendOptions& own) { host_.attend(l, q, own_out, own); });
  }
  void truncate(std::size_t tokens) {
    Device::truncate(tokens);
    host_.truncate(tokens);
  }
  void accept(const std::vector<std::size_t>& path) {
    Device::accept(path);
    host_.accept(path);
  }
  void commit() {
    Device::commit();
    host_.commit();
  }
  void compress() {
    Device::compress();
    host_.compress();
  }

  /// What the device shows of a head is what the host shows. Quantised rows leave the residual at other times,
  /// so where ranks depend on them, only their number is the same.
  void compare(std::size_t l, std::size_t h, Read read, const test::Rows& shown) const {
    CHECK(host_.tokens(l) == Device::tokens(l));
    CHECK(host_.commit_point() == Device::commit_point());
    CHECK(host_.observed_rows() == Device::observed_rows());
    const HeadRule rule = rule_of(l, h);
    const test::Rows own = test::HostBackend<E>::shown(host_, l, h, read);
    CHECK(own.size() == shown.size());
    if (rule.is_quantized() && (rule.compresses || rule.chunk > 0)) return;
    bool same_positions = true;
    bool same_numbers = true;
    for (const auto& [position, row] : shown) {
      const auto found = own.find(position);
      same_positions = same_positions && found != own.end();
      if (found == own.end() || rule.is_quantized()) continue;
      same_numbers = same_numbers && test::same_bits(row.key, found->second.key) &&
                     test::same_bits(row.value, found->second.value);
    }
    CHECK(same_positions);
    CHECK(same_numbers);
  }

 private:
  TwoCaches(Device device, Host host) : Device{std::move(device)}, host_{std::move(host)} {}

  static kvpolicy::CacheOptions host_options(const kvpolicy::gpu::CacheOptions& options) {
    kvpolicy::CacheOptions own;
    own.max_rollback = options.max_rollback;
    own.max_append = options.max_append;
    own.page_rows = options.page_rows;
    return own;
  }
  [[nodiscard]] HeadRule rule_of(std::size_t l, std::size_t h) const {
    return Device::plan().at(l, h).rule(Device::plan().shape().head_dim);
  }

  // Calls the host with the device's arguments and compares what both say.
  template <class Out, class Call>
  void on_host(std::size_t l, Out out, AttendOptions options, Call call) const {
    const std::size_t tokens = out.tokens, q_heads = out.heads, dim = out.head_dim;
    const std::vector<float> said(options.log_sum_exp.begin(), options.log_sum_exp.end());
    std::vector<float> numbers(tokens * q_heads * dim), log_sum_exp(tokens * q_heads);
    options.log_sum_exp = log_sum_exp;
    call(kvpolicy::TensorView<float>{numbers.data(), tokens, q_heads, dim}, options);
    const std::size_t group = Device::plan().shape().queries_per_kv();
    bool near = true;
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t head = 0; head < q_heads; ++head) {
        const double most = most_apart(rule_of(l, head / group));
        const std::size_t at = token * q_heads + head;
        for (std::size_t c = 0; c < dim; ++c) {
          near =
              near && difference(numbers[at * dim + c], static_cast<float>(out.row(token, head)[c])) <= most;
        }
        near = near && difference(log_sum_exp[at], said[at]) <= most;
      }
    }
    CHECK(near);
  }
  static double difference(float a, float b) {
    return std::abs(static_cast<double>(a) - static_cast<double>(b));
  }
  // A quantised number may be half a step off, and the steps of random numbers are about 8 / levels.
  static double most_apart(const HeadRule& rule) {
    const auto bits = static_cast<double>(
        std::min(kvpolicy::bits_of(rule.key_encoding), kvpolicy::bits_of(rule.value_encoding)));
    return rule.is_quantized() ? 8.0 / (std::exp2(bits) - 1.0) : test::DeviceBackend<E>::out_error;
  }

  Host host_;
};

template <kvpolicy::Element E>
struct LockstepBackend : test::DeviceBackend<E> {
  using Base = test::DeviceBackend<E>;
  using Cache = TwoCaches<E>;

  static test::Rows shown(const Cache& cache, std::size_t l, std::size_t h, Read read) {
    test::Rows rows = Base::shown(cache, l, h, read);
    cache.compare(l, h, read, rows);
    return rows;
  }
  static std::size_t live_bytes(const std::vector<const Cache*>& caches) {
    return Base::live_bytes({caches.begin(), caches.end()});
  }
};

// Every kind of head that a device serves, some at a time.
template <kvpolicy::Element E>
void lockstep(std::uint64_t seed, std::size_t operations) {
  std::vector<test::HeadSpec> left = test::device_heads();
  for (std::size_t i = 0; !left.empty(); ++i) {
    CAPTURE(i);
    const std::size_t max_rollback = i % 3 == 0 ? 0 : i % 3 == 1 ? 5 : 70;
    std::vector<test::HeadSpec> heads;
    for (auto head = left.begin(); head != left.end() && heads.size() < 9;) {
      if (max_rollback > 0 && head->cannot_return()) {
        ++head;
        continue;
      }
      heads.push_back(*head);
      head = left.erase(head);
    }
    if (heads.empty()) continue;
    kvpolicy::gpu::CacheOptions options;
    options.max_rollback = max_rollback;
    options.max_append = 1 + max_rollback;
    options.page_rows = i % 2 == 0 ? 64 : 128;
    test::Logits logits;
    if (i % 2 == 1) logits.softcap = 5.0F;
    const test::ModelShape shape{1, 2 * heads.size(), heads.size(), 64};
    test::random_operations<E, E, LockstepBackend<E>>(seed * 100 + i, shape, heads, options, logits,
                                                      operations);
  }
}

}  // namespace

TEST_CASE("host and device do the same, operation by operation") {
  const test::SmallDevice small;
  lockstep<kvpolicy::float16>(test::more_seeds(1), 30);
  lockstep<test::OtherElement>(test::more_seeds(2), 20);
}
