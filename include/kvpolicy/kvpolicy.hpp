// SPDX-License-Identifier: Apache-2.0
//
// Includes all headers that need only the standard library.
#pragma once

#include <kvpolicy/cache/admission.hpp>
#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/cache/consolidate.hpp>
#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/cache/saved_prefixes.hpp>
#include <kvpolicy/cache/swapped_cache.hpp>
#include <kvpolicy/duo.hpp>
#include <kvpolicy/fastgen.hpp>
#include <kvpolicy/headkv.hpp>
#include <kvpolicy/kivi.hpp>
#include <kvpolicy/memory/limited_memory.hpp>
#include <kvpolicy/plan/cost_table.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/prompt_moves.hpp>
#include <kvpolicy/plan/reorder.hpp>
#include <kvpolicy/plan/search.hpp>
#include <kvpolicy/plan/search_menu.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/plan/share_budgets.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/pyramidkv.hpp>
#include <kvpolicy/razor_attention.hpp>
#include <kvpolicy/storage/engine_page_storage.hpp>
#include <kvpolicy/streaming_llm.hpp>
#include <kvpolicy/triforce.hpp>
#include <kvpolicy/version.hpp>
