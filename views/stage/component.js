// The stage as a Streamlit component: called once per change of data, with the same parent element as long as it is on the page.
const mounted = new WeakMap();

export default function component({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".stage-root");
  let stage = mounted.get(root);
  if (!stage) {
    stage = mountStage(root, {});
    root.style.setProperty("--stage-reserve", "272px"); // the page puts its choosers there
    mounted.set(root, stage);
  }
  stage.hooks.need = (have) => setTriggerValue("need", { have, trace_id: data.trace_id });
  stage.update(data);
  return () => setTimeout(() => root.isConnected || stage.destroy());
}
