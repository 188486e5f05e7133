# SPDX-License-Identifier: Apache-2.0
#
# Writes a page with visualize, opens it in a headless Chromium and checks the document after its
# scripts have run: there are no errors, every head and step is there, and what the page says about a
# head is what visualize --json says.
#   cmake -DPROGRAM=<visualize> -DARGS=<list> -DPAGE=<file.html> [-DMOST_BYTES=n] [-DBROWSER=<path>]
#         -P open_page.cmake
cmake_minimum_required(VERSION 3.25)

execute_process(COMMAND "${PROGRAM}" ${ARGS} --out "${PAGE}" --json RESULT_VARIABLE status
                OUTPUT_VARIABLE json ERROR_VARIABLE complaint INPUT_FILE /dev/null)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "visualize ended with ${status}:\n${complaint}")
endif()
function(from_json out)
  string(JSON value GET "${json}" ${ARGN})
  set(${out} "${value}" PARENT_SCOPE)
endfunction()

from_json(page_bytes page_bytes)
file(SIZE "${PAGE}" size)
if(NOT size EQUAL page_bytes)
  message(FATAL_ERROR "the page has ${size} bytes, visualize says ${page_bytes}")
endif()
if(DEFINED MOST_BYTES AND NOT size LESS MOST_BYTES)
  message(FATAL_ERROR "the page has ${size} bytes, must be under ${MOST_BYTES}")
endif()
message("${size} bytes")

if(NOT BROWSER)
  find_program(BROWSER NAMES chromium chromium-browser google-chrome-stable google-chrome)
endif()
if(NOT BROWSER)
  message("skipped: there is no Chromium on the PATH to open the page in")
  return()
endif()

# dump(<out> <fragment> [PAGE file] [OPTIONS options of the browser...]): the document at
# page.html#fragment.
function(dump out fragment)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "PAGE" "OPTIONS")
  if(NOT arg_PAGE)
    set(arg_PAGE "${PAGE}")
  endif()
  set(profile "${PAGE}.profile")
  execute_process(
    COMMAND "${BROWSER}" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage
            --no-first-run --disable-background-networking --enable-logging=stderr --v=0
            "--user-data-dir=${profile}" --virtual-time-budget=10000 --window-size=1320,1500
            ${arg_OPTIONS} --dump-dom "file://${arg_PAGE}#${fragment}"
    RESULT_VARIABLE status OUTPUT_VARIABLE document ERROR_VARIABLE complaint INPUT_FILE /dev/null
    TIMEOUT 120)
  file(REMOVE_RECURSE "${profile}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the browser ended with ${status}:\n${complaint}")
  endif()
  if(complaint MATCHES "CONSOLE[^\n]*")
    message(FATAL_ERROR "the page complained: ${CMAKE_MATCH_0}")
  endif()
  set(${out} "${document}" PARENT_SCOPE)
endfunction()

function(must_match document what regex)
  if(NOT document MATCHES "${regex}")
    message(FATAL_ERROR "${what}: the document must match '${regex}'; see ${PAGE}")
  endif()
endfunction()

# must_have(<document> <times> <regex>)
function(must_have document times regex)
  string(REGEX MATCHALL "${regex}" found "${document}")
  list(LENGTH found count)
  if(NOT count EQUAL times)
    message(FATAL_ERROR "'${regex}' must stand in the document ${times} times, not ${count}; see ${PAGE}")
  endif()
endfunction()

# The number as the page writes it: 4,096.
function(with_commas out number)
  while(number MATCHES "^(.*[0-9])([0-9][0-9][0-9])($|,.*)")
    set(number "${CMAKE_MATCH_1},${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
  endwhile()
  set(${out} "${number}" PARENT_SCOPE)
endfunction()

from_json(steps steps)
from_json(prompt_tokens prompt_tokens)
from_json(new_tokens new_tokens)
math(EXPR tokens "${prompt_tokens} + ${new_tokens}")
math(EXPR last_step "${steps} - 1")
string(JSON heads LENGTH "${json}" heads)

# The page as it opens, in light and in dark.
foreach(scheme 0 1)  # dark, light
  dump(document "" OPTIONS --blink-settings=preferredColorScheme=${scheme})
  must_match("${document}" "drawn to its end" "<body[^>]*data-drawn=\"true\"")
  must_match("${document}" "nothing failed" "id=\"failure\" role=\"alert\" hidden")
endforeach()
foreach(fact "heads=\"${heads}\"" "steps=\"${steps}\"" "rows=\"${tokens}\"")
  must_match("${document}" "its numbers" "<body[^>]*data-${fact}")
endforeach()
must_have("${document}" ${heads} "class=\"cell\"")
must_have("${document}" ${heads} "class=\"band\"")
must_have("${document}" ${tokens} "<span data-row=")
must_have("${document}" 1 "<button[^>]*aria-selected=\"true\"")
if(document MATCHES "<body[^>]*data-broken" OR document MATCHES "<span data-row=[^>]*>[^<]*<[^/]")
  message(FATAL_ERROR "text of the prompt became part of the document; see ${PAGE}")
endif()

# What the page says about each head after the last step.
math(EXPR last_head "${heads} - 1")
foreach(i RANGE ${last_head})
  from_json(layer heads ${i} layer)
  from_json(head heads ${i} kv_head)
  from_json(kept heads ${i} rows_kept)
  from_json(read heads ${i} rows_read)
  from_json(exact heads ${i} rows_exact)
  # Of heads that look alike, only one is opened in a browser.
  if("${kept} ${read} ${exact}" IN_LIST seen)
    continue()
  endif()
  list(APPEND seen "${kept} ${read} ${exact}")
  dump(document "layer=${layer}&head=${head}&step=${last_step}")
  must_match("${document}" "the head asked for"
             "data-step=\"${last_step}\"[^>]* data-layer=\"${layer}\"[^>]* data-head=\"${head}\"")
  with_commas(kept_text ${kept})
  with_commas(read_text ${read})
  with_commas(tokens_text ${tokens})
  must_match("${document}" "rows kept"
             "<dt>rows kept</dt><dd>${kept_text} of ${tokens_text}<small>")
  must_match("${document}" "rows read" "<dt>rows read</dt><dd>${read_text}<small>")
  if(NOT exact EQUAL kept)
    math(EXPR coarse "${kept} - ${exact}")
    with_commas(coarse_text ${coarse})
    must_match("${document}" "quantised rows" "<dt>of these in [0-9a-z, -]+</dt><dd>${coarse_text}<small>")
    must_have("${document}" ${coarse} "class=\"[a-z ]*coarse[a-z ]*\"")
  endif()
  string(JSON most ERROR_VARIABLE unread GET "${json}" heads ${i} most_attended_row)
  if(NOT unread)
    must_match("${document}" "where it looks" "aria-label=\"Scroll the text to row ${most}\"")
  endif()
  string(JSON bound ERROR_VARIABLE read_all GET "${json}" heads ${i} unread_bound)
  if(NOT read_all)
    must_match("${document}" "what a bound left" "<dt>attention left unread</dt><dd>[0-9.]+ %<small>at most [0-9.]+ % by the bound")
  endif()
  # The text shows the same as the numbers, row by row.
  must_have("${document}" ${read} "class=\"[a-z ]*read[a-z ]*\"")
  if(kept GREATER_EQUAL read)
    math(EXPR gone "${tokens} - ${kept}")
    must_have("${document}" ${gone} "class=\"gone\"")
  endif()
endforeach()
# The page in use.
file(READ "${PAGE}" page)
file(READ "${CMAKE_CURRENT_LIST_DIR}/drive_page.js" drive)
string(REPLACE "</body>" "<script>${drive}</script></body>" page "${page}")
file(WRITE "${PAGE}.driven.html" "${page}")
dump(document "" PAGE "${PAGE}.driven.html")
must_match("${document}" "used by mouse and keys" "<body[^>]* data-driven=\"[^\"]*\"")
if(NOT document MATCHES "<body[^>]* data-driven=\"well\"")
  string(REGEX MATCH "data-driven=\"[^\"]*\"" wrong "${document}")
  message(FATAL_ERROR "used by mouse and keys: ${wrong}")
endif()
file(REMOVE "${PAGE}.driven.html")
list(LENGTH seen opened)
message("opened: ${heads} heads, ${steps} steps, ${tokens} rows; ${opened} different heads looked at")
