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
  const {keyBits, valueBits} = kind;
  const bits = keyBits === valueBits ? keyBits + ' bits' : keyBits + '-bit keys, ' + valueBits + '-bit values';
  const shortBits = keyBits === 0 ? '' : keyBits === valueBits ? bits : 'k' + keyBits + 'v' + valueBits;
  const label = (known ? policyLabels[kind.policy] : kind.policy) + (keyBits > 0 ? ', ' + bits : '');
  const isQuantized = kind.policy === 'full' && keyBits > 0;
  const colour = !known ? 'other' : isQuantized ? 'quantized' : kind.policy;
  return {...kind, bits, shortBits, label, colour: 'var(--' + colour + ')'};
});

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const {tokens, texts} = about;
const rowCount = tokens.length;

// The text of each row as shown. A character of several tokens is shown at its last one; the others, control
// characters and what is no text are dots.
const glyphs = texts.map((text) =>
  text === '' ? '·' : text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\ufffd]/g, '·').replace(/\n/g, '↵\n'));
const inline = (row) => glyphs[row].replace(/\n/g, '');
// Tokens to show around another, so that they take about as much space whatever a token is.
const around = Math.max(2, Math.round(14 * rowCount / Math.max(1, texts.join('').length)));
function quoted(row) {
  const text = inline(row);
  return text === ' ' ? 'a space' : text === '↵' ? 'a line end' : '“' + text + '”';
}

// heads[i]: kind, setting, bytes and bytesRead by step; unread[step] (where reads have a bound): what was left
// unread by the bound, and measured, in millionths of the attention, or null; until[row] and exactUntil[row] (null: rows
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
