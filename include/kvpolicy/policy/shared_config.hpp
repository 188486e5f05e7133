// SPDX-License-Identifier: Apache-2.0
//
// A policy's settings, held once for all heads that have them.
#pragma once

#include <memory>
#include <utility>

namespace kvpolicy {

/// Settings that never change, in shared ownership. A policy that is also constructible from
/// (SharedConfig<Config>, const StorageContext&) shares them with the plan and the other heads;
/// others copy them.
template <class Config>
class SharedConfig {
 public:
  /// A copy of its own. @throws std::bad_alloc
  explicit SharedConfig(const Config& config) : own_{std::make_shared<const Config>(config)} {}
  /// `config` must not be null.
  explicit SharedConfig(std::shared_ptr<const Config> config) : own_{std::move(config)} {}

  [[nodiscard]] const Config& operator*() const noexcept { return *own_; }
  [[nodiscard]] const Config* operator->() const noexcept { return own_.get(); }

 private:
  std::shared_ptr<const Config> own_;
};

}  // namespace kvpolicy
