// SPDX-License-Identifier: Apache-2.0
//
// Finds a policy by its name, for files and tools that learn at run time which policy a head gets. A plan
// in code needs no registry: any policy's settings can be set.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/policy/head_settings.hpp>

namespace kvpolicy {

/// Policies over rows of element type E, by name. Add a policy of your own like this:
///
///     auto policies = kvpolicy::shipped_policies<float16>();
///     policies.add<StridedCache>();
///     const auto plan = kvpolicy::io::load_plan<float16>(path, policies);
///
/// Any number of threads may read one registry.
template <Element E>
class PolicyRegistry {
 public:
  /// Adds the policy; it replaces a policy of the same names.
  /// @throws std::bad_alloc
  template <KvPolicy P>
  PolicyRegistry& add() {
    static_assert(std::same_as<typename P::element_type, E>,
                  "PolicyRegistry::add: the policy has rows of another element type");
    static_assert(policy_traits<P>::has_name && HasFields<typename P::Config>,
                  "PolicyRegistry::add: to be written to files a policy needs a `name`, and its Config "
                  "`void fields(FieldVisitor&)`");
    return put({policy_traits<P>::names(), [](FieldVisitor& fill) -> HeadSettings<E> {
                  typename P::Config config;
                  config.fields(fill);
                  return config;
                }});
  }

  /// The settings of the policy with these names, filled in by `fill`; nothing if no policy has these
  /// names.
  /// @throws what `fill` throws
  [[nodiscard]] std::optional<HeadSettings<E>> read(const PolicyNames& names, FieldVisitor& fill) const {
    for (const Entry& entry : entries_) {
      if (entry.names == names) return entry.read(fill);
    }
    return std::nullopt;
  }

  /// The names of all policies, in the order in which they were added.
  [[nodiscard]] std::vector<PolicyNames> names() const {
    std::vector<PolicyNames> all;
    for (const Entry& entry : entries_) all.push_back(entry.names);
    return all;
  }

 private:
  struct Entry {
    PolicyNames names;
    HeadSettings<E> (*read)(FieldVisitor& fill);
  };

  PolicyRegistry& put(const Entry& entry) {
    std::erase_if(entries_, [&](const Entry& known) { return known.names == entry.names; });
    entries_.push_back(entry);
    return *this;
  }

  std::vector<Entry> entries_;
};

}  // namespace kvpolicy
