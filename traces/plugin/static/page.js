// What is on the page, before it is filled.

const key = (name, text) => `<kbd>${name}</kbd> ${text}`;

const KEYS = [
  key("←", "") + key("→", "the round before, the next round"),
  "in the timeline, once it has the focus:",
  key("w", "") + key("s", "or ") + key("+", "") + key("-", "zoom"),
  key("a", "") + key("d", "move"),
  key("0", "all of the round"),
  key("n", "") + key("p", "next task, task before"),
  key("↑", "") + key("↓", "another row"),
  "wheel (with Ctrl if it has no focus) zooms, dragging moves, a double click shows all",
].join(" &nbsp; ");

export const PAGE = `
<header>
  <label>run <select id="run"></select></label>
  <span>
    <button id="before" aria-label="the round before">◀</button>
    <label>round <input id="round" type="number" min="0"></label>
    <button id="after" aria-label="the next round">▶</button>
    <span id="of"></span>
  </span>
  <label>compare with <select id="compare"></select></label>
  <label>its round <input id="compareRound" type="number" min="0" disabled></label>
  <button id="reload">read again</button>
  <span id="status" role="status"></span>
</header>
<main id="content" hidden>
  <section aria-label="all rounds"><div id="overview"></div></section>
  <section aria-label="timeline of the round">
    <div class="bar">
      <button id="zoomIn" aria-label="zoom in">+</button>
      <button id="zoomOut" aria-label="zoom out">−</button>
      <button id="fit">whole round</button>
      <span id="range"></span>
      <span class="legend"><i class="waits"></i> the target waits <i class="exposed"></i> exposed draft
        <i class="end"></i> end of the round, dashed as planned</span>
    </div>
    <div class="timeline">
      <div id="labels"></div>
      <div class="drawing"><canvas id="canvas" tabindex="0" role="img" aria-describedby="details"
        aria-label="timeline of the round; n and p go from task to task"></canvas></div>
    </div>
    <p id="details" aria-live="polite"></p>
    <p class="keys">${KEYS}</p>
    <div id="tip" role="tooltip" hidden></div>
  </section>
  <div class="columns">
    <section><h2>Round</h2><table id="roundFigures"></table><p id="why"></p><table id="busy"></table></section>
    <section><h2>Run</h2><table id="runFigures"></table></section>
    <section><h2>Acceptance per position</h2><div id="acceptance"></div>
      <h2>Memory</h2><table id="memory"></table>
      <h2>Requests of the round</h2><table id="requests"></table></section>
  </div>
  <section><h2>Layers</h2><div class="scroll" tabindex="0"><table id="layers"></table></div></section>
  <section><h2>Plan</h2><pre id="plan" tabindex="0"></pre></section>
  <section><h2>Made with</h2><table id="info"></table></section>
</main>`;
