// SPDX-License-Identifier: Apache-2.0
'use strict';
// Decodes the recording that page.cpp writes. CMake joins this and the other scripts in the order
// of examples/CMakeLists.txt. Text of the model or the prompt is only put into the page as
// textContent.

const element = (id) => document.getElementById(id);
const fail = (what) => {
  element('failure').textContent = 'This page could not be drawn: ' + what;
  element('failure').hidden = false;
};
window.addEventListener('error', (event) => fail(event.message));

const about = JSON.parse(element('recording').textContent);
const steps = about.steps;
const lastStep = steps.length - 1;

// ---- numbers

const whole = (n) => Math.round(n).toLocaleString('en-US');
function bytes(n) {
  if (n >= 1e9) return (n / 1e9).toFixed(2) + ' GB';
  if (n >= 1e6) return (n / 1e6).toFixed(2) + ' MB';
  if (n >= 1e3) return (n / 1e3).toFixed(1) + ' kB';
  return n + ' B';
}
const percent = (share, digits = 1) => (100 * share).toFixed(digits) + ' %';
const plural = (n, one, many) => whole(n) + ' ' + (n === 1 ? one : many);

// ---- what was recorded

const policyLabels = {
  full: 'every row',
  sink_recent: 'sinks and recent rows',
  head_budget: 'a budget of rows',
  chunk_retrieval: 'every row, few read',
};
const kinds = about.kinds.map((kind) => {
  const known = kind.policy in policyLabels;
  const bits = kind.bits > 0 ? ', ' + kind.bits + ' bits' : '';
  const label = (known ? policyLabels[kind.policy] : kind.policy) + bits;
  const isQuantized = kind.policy === 'full' && kind.bits > 0;
  const colour = !known ? 'other' : isQuantized ? 'quantized' : kind.policy;
  return {...kind, label, colour: 'var(--' + colour + ')'};
});

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const isBytes = typeof about.tokens === 'string';
const tokens = isBytes ? bytesOf(about.tokens) : about.tokens;
const rowCount = tokens.length;

// The text of each row as shown. A character of several bytes is shown at its first byte.
const glyphs = (() => {
  if (!isBytes) return Array.from(tokens, (token) => token + ' ');
  const decoder = new TextDecoder('utf-8', {fatal: true});
  const shown = [];
  while (shown.length < rowCount) {
    const at = shown.length;
    const byte = tokens[at];
    if (byte === 10) shown.push('↵\n');
    else if (byte >= 32 && byte < 127) shown.push(String.fromCharCode(byte));
    else {
      const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
      let character = '·';
      try {
        if (length > 1) character = decoder.decode(Uint8Array.from(tokens.slice(at, at + length)));
      } catch { /* no UTF-8: a dot for the byte */ }
      shown.push(character);
      for (let i = 1; i < length && character !== '·'; ++i) shown.push('·');
    }
  }
  return shown;
})();
const inline = (row) => (isBytes ? glyphs[row].replace('\n', '') : glyphs[row].trim());
function quoted(row) {
  const text = inline(row);
  return text === ' ' ? 'a space' : text === '↵' ? 'a line end' : '“' + text + '”';
}

// heads[i]: kind, setting, bytes and bytesRead by step; until[row] and exactUntil[row] (null: rows
// are exact as long as they are kept), one more than the last step; reads[step]: how, runs, rows,
// levels.
const asNothing = 0, asKept = 1, asBeforeAndNew = 2;
const heads = (() => {
  const data = bytesOf(about.rows);
  let at = 0;
  const number = () => {
    for (let value = 0, scale = 1;; scale *= 128) {
      const byte = data[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  const untils = () => {
    const runs = number();
    if (runs === 0) return null;
    const until = new Uint16Array(rowCount);
    for (let run = 0, row = 0; run < runs; ++run) {
      const rows = number();
      until.fill(number(), row, row + rows);
      row += rows;
    }
    return until;
  };
  const read = () => {
    const how = data[at++];
    const runs = [];
    if (how === 3) {
      for (let left = number(), end = 0; left > 0; --left) {
        const first = end + number();
        end = first + number();
        runs.push([first, end]);
      }
    }
    const count = number();
    const rows = new Uint32Array(count);
    const levels = new Uint8Array(count);
    for (let i = 0, end = 0; i < count; ++i) {
      rows[i] = end + number();
      levels[i] = data[at++];
      end = rows[i] + 1;
    }
    return {how, runs, rows, levels};
  };
  return about.heads.map((head, index) => {
    const until = untils() ?? new Uint16Array(rowCount);
    const exactUntil = untils();
    const reads = steps.map(read);
    return {...head, kind: kinds[head.kind], index, until, exactUntil, reads,
            layer: Math.floor(index / about.kvHeads), kvHead: index % about.kvHeads};
  });
})();
const nameOf = (head) => 'layer ' + head.layer + ', KV head ' + head.kvHead;
const shareOf = (level) => (level / 255) ** 2;

// For each row of the text 0, or a sum of these flags.
const isKept = 1, isRead = 2, isCoarse = 4;
function rowsAt(head, step) {
  const {tokens: length} = steps[step];
  const state = new Uint8Array(rowCount);
  for (let row = 0; row < length; ++row) {
    if (head.until[row] > step) {
      state[row] = isKept;
      if (head.exactUntil && head.exactUntil[row] <= step) state[row] |= isCoarse;
    }
  }
  const {how, runs} = head.reads[step];
  const before = step === 0 ? 0 : steps[step - 1].tokens;
  for (let row = 0; row < length; ++row) {
    if (how === asKept ? head.until[row] > step
        : how === asBeforeAndNew && (row >= before || head.until[row] > step - 1)) {
      state[row] |= isRead;
    }
  }
  for (const [first, end] of runs) {
    for (let row = first; row < end; ++row) state[row] |= isRead;
  }
  return state;
}
const counted = (state, flag) => state.reduce((sum, s) => sum + ((s & flag) ? 1 : 0), 0);
