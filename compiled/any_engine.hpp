// SPDX-License-Identifier: Apache-2.0
//
// The interface through which the compiled engine calls the engine of one instruction set, and the
// functions that make such an engine. Each function is defined in the file that has its name.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include <kvpolicy/compiled/engine.hpp>

namespace kvpolicy::compiled::detail {

class AnyEngine {
 public:
  explicit AnyEngine(std::string_view name) : name_{name} {}
  virtual ~AnyEngine() = default;
  AnyEngine& operator=(const AnyEngine&) = delete;
  AnyEngine& operator=(AnyEngine&&) = delete;

  [[nodiscard]] virtual std::unique_ptr<AnyEngine> copy() const = 0;
  virtual void attend_all(std::span<const LayerAttention> works) = 0;
  virtual void observe(const LayerObservation& work) = 0;
  virtual void score(const Plane& rows, std::span<const float> query, std::span<float> out) = 0;
  virtual void bound(const LayerBounds& work) = 0;
  [[nodiscard]] std::string_view name() const noexcept { return name_; }

 protected:
  AnyEngine(const AnyEngine&) = default;
  AnyEngine(AnyEngine&&) = default;

 private:
  std::string_view name_;
};

using Make = std::unique_ptr<AnyEngine>(std::string_view name, const AnyParallelFor& pool);
Make make_baseline, make_sse4, make_avx2, make_avx512;

}  // namespace kvpolicy::compiled::detail
