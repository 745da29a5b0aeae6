// Says how old the page of a running study is, and looks for a newer one: after so many seconds, or a tenth of its age,
// so that the page of a study that was killed asks ever more rarely, and after a day not any more.
"use strict";

const DAY = 86400;
const written = document.querySelector("time");
const age = () => Math.max(0, (Date.now() - Date.parse(written.dateTime)) / 1000);

function words(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function tell() {
  const killed = age() > DAY ? "; reload it to look for a newer one" : "";
  document.getElementById("age").textContent = `, ${words(age())} ago${killed}`;
}

tell();
setInterval(tell, 1000);
// A reload keeps the place that the page is scrolled to.
const wait = Math.max(Number(written.dataset.seconds), age() / 10);
if (age() <= DAY) setTimeout(() => location.reload(), 1000 * wait);
