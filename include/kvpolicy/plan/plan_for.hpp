// SPDX-License-Identifier: Apache-2.0
//
// How the plan builders name their result: `duo_plan<half>(…)` makes the method's own, smallest
// plan type, `duo_plan<AnyPlan<half>>(…)` any other that has the policies the method needs.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/head_table.hpp>

namespace kvpolicy {

namespace detail {

template <class T>
struct ElementOf {
  using type = typename T::element_type;
};
template <Element T>
struct ElementOf<T> {
  using type = T;
};
/// An element type is its own; a plan has one.
template <class T>
using element_of = typename ElementOf<T>::type;

template <class T, template <class> class Default>
struct PlanFor {
  using type = T;
};
template <Element T, template <class> class Default>
struct PlanFor<T, Default> {
  using type = Default<T>;
};

/// Refuses a table of another model's heads.
/// @throws ConfigError unless `table` has one entry for each KV head of `shape`.
template <class T>
void require_fits(const HeadTable<T>& table, const ModelShape& shape, const char* what) {
  require(table.layers() == shape.layers && table.heads() == shape.kv_heads, what, ": a table of ",
          table.layers(), " layers x ", table.heads(), " heads does not fit a model of ",
          shape.layers, " layers x ", shape.kv_heads, " KV heads");
}

}  // namespace detail

/// `Default<T>` for an element type, `T` itself for a plan.
template <class T, template <class> class Default>
using plan_for = typename detail::PlanFor<T, Default>::type;

/// The same policy and settings for every head:
/// `uniform_plan<FullCache<DenseStorage<float>>>(shape)`.
template <KvPolicy P>
[[nodiscard]] HeadPlan<P> uniform_plan(const ModelShape& shape,
                                       const typename P::Config& config = {}) {
  return HeadPlan<P>{shape, config};
}

}  // namespace kvpolicy
