// SPDX-License-Identifier: Apache-2.0
//
// cpu::Engine behind AnyEngine, for the one target that the including file names. Highway includes this
// file once for each of its targets; all but one find nothing. (All targets in one file, Highway's usual
// way, would be one object of a minute and more than 1 GB.)
#include <hwy/highway.h>

#if HWY_TARGET == KVPOLICY_COMPILED_TARGET
#include <kvpolicy/cpu/engine.hpp>

namespace kvpolicy::compiled::detail {
namespace HWY_NAMESPACE {

class EngineOnTarget final : public AnyEngine {
 public:
  EngineOnTarget(std::string_view name, const AnyParallelFor& pool) : AnyEngine{name}, engine_{pool} {}

  [[nodiscard]] std::unique_ptr<AnyEngine> copy() const override {
    return std::make_unique<EngineOnTarget>(*this);
  }
  void attend(const LayerAttention& work) override { engine_.attend(work); }
  void observe(const LayerObservation& work) override { engine_.observe(work); }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) override {
    engine_.score(rows, query, out);
  }

 private:
  cpu::Engine<AnyParallelFor> engine_;
};

}  // namespace HWY_NAMESPACE

std::unique_ptr<AnyEngine> KVPOLICY_COMPILED_MAKE(std::string_view name, const AnyParallelFor& pool) {
  return std::make_unique<HWY_NAMESPACE::EngineOnTarget>(name, pool);
}

}  // namespace kvpolicy::compiled::detail
#endif
