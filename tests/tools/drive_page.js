// SPDX-License-Identifier: Apache-2.0
//
// Uses a page of visualize like a reader, by mouse and by keys. open_page.cmake adds this after the
// page's own script. It stores the error, or "well", as data of the body.
(async () => {
  const {dataset} = document.body;
  const failures = [];
  const expect = (what, value, wanted) => {
    const is = value();
    if (String(is) !== String(wanted)) failures.push(what + ': ' + is + ', not ' + wanted);
  };
  const place = () => dataset.layer + '.' + dataset.head;
  const step = () => dataset.step;
  const press = (key) => document.activeElement.dispatchEvent(
    new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  const point = (type, target, x, y) => target.dispatchEvent(
    new MouseEvent(type, {clientX: x, clientY: y, bubbles: true, cancelable: true}));
  const byId = (id) => document.getElementById(id);
  const last = Number(dataset.steps) - 1;

  const cells = [...document.querySelectorAll('.cell')];
  const across = document.querySelectorAll('[role=row]')[1].querySelectorAll('.cell').length;
  cells[0].click();
  expect('a click on a head', place, '0.0');
  cells[0].focus();
  press('ArrowRight');
  expect('the arrow to the right', place, '0.1');
  press('ArrowDown');
  expect('the arrow down', place, '1.1');
  expect('the focus', () => cells.indexOf(document.activeElement), across + 1);
  expect('heads that Tab reaches', () => cells.filter((cell) => cell.tabIndex === 0).length, 1);
  press('ArrowLeft');
  press('ArrowUp');
  expect('back to the first head', place, '0.0');

  byId('step').value = 0;
  byId('step').dispatchEvent(new Event('input'));
  expect('the slider', step, 0);
  expect('the step in words', () => byId('now').textContent.startsWith('Step 1 of '), true);
  byId('on').click();
  expect('a step on', step, 1);
  byId('back').click();
  byId('back').click();
  expect('no step before the first', step, 0);

  const box = byId('map').getBoundingClientRect();
  point('click', byId('map'), box.left + 5, box.bottom - 1);
  expect('a click on the map', step, last);
  byId('map').focus();
  press('ArrowUp');
  expect('the arrow up on the map', step, last - 1);
  point('mousemove', byId('map'), box.left + 5, box.bottom - 1);
  expect('what the map says', () => byId('tip').textContent.includes('\nrow '), true);
  point('mouseleave', byId('map'), 0, 0);
  expect('the tip is gone', () => byId('tip').hidden, true);
  point('mousemove', document.querySelector('#text span'), 5, 5);
  expect('what a row says', () => /^row 0, .*\n(kept|dropped)/.test(byId('tip').textContent), true);

  byId('step').value = last;
  byId('step').dispatchEvent(new Event('input'));
  expect('the end', step, last);
  byId('play').click();
  await new Promise((done) => setTimeout(done, 500));
  expect('playing begins anew at the first', () => step() > 0 && step() < last, last > 4);
  byId('play').click();
  const stopped = step();
  await new Promise((done) => setTimeout(done, 500));
  expect('playing stops', step, stopped);

  location.hash = '#layer=1&head=0&step=2';
  await new Promise((done) => setTimeout(done, 50));
  expect('the address names a head', place, '1.0');
  expect('the address names a step', step, 2);
  location.hash = '#layer=99&head=0&step=-1';
  await new Promise((done) => setTimeout(done, 50));
  expect('an address of no head', () => place() + ' ' + step(), '1.0 2');
  dataset.driven = failures.length === 0 ? 'well' : failures.join('; ');
})();
