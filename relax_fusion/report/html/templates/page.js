// --- What was chosen at some rows ---------------------------------------------------------
const choices = JSON.parse(byId("choices").textContent);
const body = byId("chosen-table").tBodies[0];
const heads = all("th", byId("chosen-table")).map((head) => head.textContent);
const cell = (row, text, style = "") => {
  const made = row.insertCell();
  made.dataset.head = heads[made.cellIndex];
  made.className = style;
  made.textContent = text;
  return made;
};
const named = (element, plan, how) => {
  for (const [text, style] of [[plan, "mono"], [how, "muted"]]) {
    const part = document.createElement("span");
    part.className = style;
    part.textContent = text;
    if (text) element.append(" ", part);
  }
};
const within = (upper, rows) => upper === null || rows <= upper;
const choose = (rows) => {
  body.replaceChildren();
  for (const chain of choices) {
    const step = chain.steps.find(([upper]) => within(upper, rows));
    const range = chain.ranges.find(({ upper }) => within(upper, rows));
    const row = body.insertRow();
    const link = document.createElement("a");
    link.href = `#${chain.id}`;
    link.textContent = chain.title;
    const first = cell(row, "");
    first.append(link, document.createElement("br"));
    const where = document.createElement("span");
    where.className = "muted";
    where.textContent = chain.in;
    first.append(where);
    const [plan, how] = step ? step.slice(2) : range ? [range.plan, range.how] : ["–", ""];
    named(cell(row, ""), plan, how);
    cell(row, chain.fixed ? chain.fixed : step ? step[1] : "–");
    named(cell(row, range ? range.size : "–"), range && range.plan !== plan ? range.plan : "", "");
    cell(row, range ? range.time : "–", "n strong");
    cell(row, range ? range.floor : "–", "n");
    cell(row, range ? range.bound : "–");
    const lost = cell(row, "");
    const others = (range ? range.rejected : []).filter(([o, w]) => o !== plan || w !== how);
    if (!others.length) lost.textContent = "no other candidate on this page";
    else for (const [other, ways, time, more] of others.slice(0, 3)) {
      const line = document.createElement("div");
      const cost = document.createElement("span");
      cost.textContent = `${time} (${more})`;
      line.append(cost);
      named(line, other, ways);
      lost.append(line);
    }
  }
};
const showRange = (fold, index) => {
  all(".range", fold).forEach((r) => r.classList.toggle("here", r.dataset.range === index));
  all(".tabs button", fold).forEach((b) => {
    b.classList.toggle("here", b.dataset.range === index);
    b.setAttribute("aria-pressed", b.dataset.range === index);
  });
};
const ranges = (rows) => {
  for (const fold of all(".candidates")) {
    const tabs = all(".tabs button", fold);
    const fits = (b) => b.dataset.upper === "" || rows <= Number(b.dataset.upper);
    if (tabs.length) showRange(fold, (tabs.find(fits) || tabs[tabs.length - 1]).dataset.range);
    else showRange(fold, "0");
  }
};
const input = byId("rows");
const update = () => {
  const rows = Math.floor(Number(input.value));
  if (!(rows >= 1)) return;
  choose(rows);
  ranges(rows);
  all("#roofline circle[data-rows]").forEach((dot) => {
    dot.classList.toggle("now", Number(dot.dataset.rows) === rows);
  });
};
input.addEventListener("input", update);
all(".tabs button").forEach((button) => {
  button.addEventListener("click", () => {
    showRange(button.closest(".candidates"), button.dataset.range);
  });
});

update();
