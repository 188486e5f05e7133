// SPDX-License-Identifier: Apache-2.0
//
// The foot of the page, and the function that draws everything.

// ---- the foot

function drawAbout() {
  const pieces = steps.filter((step) => step.kind === 'prompt').length;
  const size = about.piece === 1 ? 'one token' : 'up to ' + plural(about.piece, 'token', 'tokens');
  const mean = about.group > 1
    ? ', as a mean over the ' + about.group + ' query heads that share a KV head' : '';
  const lines = [
    ['A row is one token’s key and value in one KV head. The plan says what each head keeps and',
     'reads of them.'],
    ['Sampled: the prompt was read in ' + plural(pieces, 'piece', 'pieces') + ' of ' + size + ', and',
     'each piece is a step: what its last token’s query read, and what was kept after it. After the',
     'prompt every token is a step. A prompt reads all rows; heads that select do so at each new',
     'token.'],
    ['Attention is the engine’s own, for the rows that the cache gave it' + mean + '; in 256 levels,',
     'and left out below ' + percent(about.leastShown, 2) + ' of a query’s.'],
    ...(heads.some((head) => head.unread) ? [[
      'New tokens read with a bound: the upper 4 bits of a quantised key say how much attention its row can get',
      'at most (or, as the plan says, by an estimate). Rows that together can get no more than the plan allows',
      'are not read in full. Their attention was measured besides, and is shown with that of the others.']] : []),
    ['Bytes held are whole pages of 64 rows, with summaries where heads select by them. Bytes read',
     'are those of cached keys and values; what a head reads to select is not among them, nor are',
     'the rows of the piece or token itself. 1 MB is 1,000,000 bytes.'],
    ['Keys: arrows go through the heads in their table, and through the steps on the slider and on',
     'the map. The address of the page names head and step.'],
  ];
  element('about').append(...lines.map((line) => make('li', line.join(' '))));
}

// ---- drawing everything

function draw() {
  drawNow();
  drawGrid();
  drawChart();
  drawHead();
  const {layer, kvHead} = heads[chosen.head];
  Object.assign(document.body.dataset, {heads: heads.length, steps: steps.length, rows: rowCount,
                                        step: chosen.step, layer, head: kvHead});
}

let playing = 0;
function play(on) {
  clearInterval(playing);
  element('play').setAttribute('aria-pressed', on);
  if (!on) return;
  if (chosen.step === lastStep) choose({step: 0});
  playing = setInterval(() => {
    choose({step: chosen.step + 1});
    if (chosen.step >= lastStep) play(false);
  }, 140);
}

readAddress();
drawFacts();
makeGrid();
makeChart();
makeMap();
makeText();
drawAbout();
element('step').max = lastStep;
const goTo = (step) => {
  play(false);
  choose({step});
};
element('step').addEventListener('input', (event) => goTo(Number(event.target.value)));
element('back').addEventListener('click', () => goTo(chosen.step - 1));
element('on').addEventListener('click', () => goTo(chosen.step + 1));
element('play').addEventListener('click', (event) =>
  play(event.currentTarget.getAttribute('aria-pressed') !== 'true'));
const redraw = () => { mapIsOf = null; choose({}); };
addEventListener('resize', redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
addEventListener('hashchange', () => { readAddress(); redraw(); });
draw();
document.body.dataset.drawn = 'true';
